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
SETTINGS=${SETTINGS:-examples/quickstart}
DB=${DB:-$RUN/labels.db}
ANNOTATOR=${ANNOTATOR:-signal} # or human
TIE=${TIE:-0.2} # scores this close are a tie
JUDGE="--gold $SIGNAL"
[ "$ANNOTATOR" = signal ] || JUDGE= # what people want, the signal does not know

step() { # one command of the loop, and its seconds
    local began=$SECONDS
    rlhf "$@"
    echo "$1 $((SECONDS - began))" >>"$RUN/seconds"
}

mkdir -p "$RUN"
step import "$PROMPTS" --db "$DB"
step generate --config $SETTINGS/generate.yaml --db "$DB" --model "$MODEL" --seed "$SEED"
[ "$ANNOTATOR" != signal ] || step annotate --annotator "signal:$SIGNAL" --tie-within "$TIE" --db "$DB"
[ -d "$RUN/rankings" ] || step export --db "$DB" --kind "$ANNOTATOR" --out "$RUN/rankings"

step train-reward --config $SETTINGS/reward.yaml --rankings "$RUN/rankings" --model "$MODEL" \
    --seed "$SEED" --out "$RUN/reward" --resume
step reference --config $SETTINGS/reference.yaml --prompts "$RUN/rankings" --model "$MODEL" \
    --reward "$RUN/reward" --seed "$SEED" --out "$RUN/reference" --resume
step ppo --config $SETTINGS/ppo.yaml --model "$MODEL" --reward "$RUN/reward" \
    --reference "$RUN/reference" --seed "$SEED" --steps "$STEPS" --out "$RUN/ppo" --resume
step evaluate --policy "$RUN/ppo" --reference "$RUN/reference" --reward "$RUN/reward" \
    $JUDGE --seed "$SEED" --out "$RUN/evaluate" --resume

echo "The report: $RUN/evaluate/report.html"
