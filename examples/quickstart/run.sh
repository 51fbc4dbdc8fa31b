#!/usr/bin/env bash
# From prompts to a better model, on a laptop: every command of the loop, in order. Run it again and it goes on where
# it stopped. After ranking by hand (`make label`), run it with RUN=runs/second ANNOTATOR=human to train on that.
set -euo pipefail

RUN=${RUN:-runs/demo}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}
PROMPTS=${PROMPTS:-examples/quickstart/prompts.jsonl}
SEED=${SEED:-0}
STEPS=${STEPS:-16}
SIGNAL=examples.quickstart.sentiment:score
SETTINGS=examples/quickstart
DB=$RUN/labels.db

mkdir -p "$RUN"
rlhf import "$PROMPTS" --db "$DB"
rlhf generate --config $SETTINGS/generate.yaml --db "$DB" --model "$MODEL" --seed "$SEED"
rlhf annotate --annotator "signal:$SIGNAL" --tie-within 0.4 --db "$DB"
[ -d "$RUN/rankings" ] || rlhf export --db "$DB" --out "$RUN/rankings"

rlhf train-reward --config $SETTINGS/reward.yaml --rankings "$RUN/rankings" --model "$MODEL" \
    --seed "$SEED" --out "$RUN/reward" --resume
rlhf reference --config $SETTINGS/reference.yaml --prompts "$RUN/rankings" --model "$MODEL" \
    --reward "$RUN/reward" --seed "$SEED" --out "$RUN/reference" --resume
rlhf ppo --config $SETTINGS/ppo.yaml --model "$MODEL" --reward "$RUN/reward" \
    --reference "$RUN/reference" --seed "$SEED" --steps "$STEPS" --out "$RUN/ppo" --resume
rlhf evaluate --policy "$RUN/ppo" --reference "$RUN/reference" --reward "$RUN/reward" \
    --gold $SIGNAL --seed "$SEED" --out "$RUN/evaluate" --resume

echo "The report: $RUN/evaluate/report.html"
