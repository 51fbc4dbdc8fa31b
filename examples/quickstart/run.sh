#!/usr/bin/env bash
# From prompts to a better model, on a laptop: every command of the loop, in order. Run it again and it goes on where
# it stopped. After ranking by hand (`make label`), train on that with
#
#     DB=runs/demo/labels.db RUN=runs/human ANNOTATOR=human make demo
set -euo pipefail

RUN=${RUN:-runs/demo}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}
PROMPTS=${PROMPTS:-examples/quickstart/prompts.jsonl}
SEED=${SEED:-0}
STEPS=${STEPS:-16}
SIGNAL=examples.quickstart.sentiment:score
SETTINGS=examples/quickstart
DB=${DB:-$RUN/labels.db}
ANNOTATOR=${ANNOTATOR:-signal} # or human
JUDGE="--gold $SIGNAL"
[ "$ANNOTATOR" = signal ] || JUDGE= # what people want, the signal does not know

mkdir -p "$RUN"
rlhf import "$PROMPTS" --db "$DB"
rlhf generate --config $SETTINGS/generate.yaml --db "$DB" --model "$MODEL" --seed "$SEED"
[ "$ANNOTATOR" != signal ] || rlhf annotate --annotator "signal:$SIGNAL" --tie-within 0.4 --db "$DB"
[ -d "$RUN/rankings" ] || rlhf export --db "$DB" --kind "$ANNOTATOR" --out "$RUN/rankings"

rlhf train-reward --config $SETTINGS/reward.yaml --rankings "$RUN/rankings" --model "$MODEL" \
    --seed "$SEED" --out "$RUN/reward" --resume
rlhf reference --config $SETTINGS/reference.yaml --prompts "$RUN/rankings" --model "$MODEL" \
    --reward "$RUN/reward" --seed "$SEED" --out "$RUN/reference" --resume
rlhf ppo --config $SETTINGS/ppo.yaml --model "$MODEL" --reward "$RUN/reward" \
    --reference "$RUN/reference" --seed "$SEED" --steps "$STEPS" --out "$RUN/ppo" --resume
rlhf evaluate --policy "$RUN/ppo" --reference "$RUN/reference" --reward "$RUN/reward" \
    $JUDGE --seed "$SEED" --out "$RUN/evaluate" --resume

echo "The report: $RUN/evaluate/report.html"
