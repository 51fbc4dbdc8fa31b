#!/usr/bin/env bash
# One more round, after examples/quickstart/run.sh or another finished round: the newest policy's samples are ranked, the
# reward model is trained again on the rankings of all rounds, and PPO goes on from the newest policy.
#
#     FIRST=runs/demo LAST=runs/demo NEXT=runs/second bash examples/rounds/round.sh
#
# Run it again and it goes on where it stopped. People rank between the first and the third command: set SIGNAL= KIND=human
# ANNOTATE="rlhf label --db runs/demo/labels.db", and end it with Ctrl-C. The brake of each round is the policy that it
# starts from; the last command compares with the original of FIRST.
set -euo pipefail

FIRST=${FIRST:-runs/demo}
LAST=${LAST:-$FIRST}
NEXT=${NEXT:-runs/second}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}
DB=${DB:-$FIRST/labels.db}
SIGNAL=${SIGNAL-examples.quickstart.sentiment:score}
ANNOTATE=${ANNOTATE:-rlhf annotate --annotator signal:$SIGNAL --tie-within 0.4 --db $DB}
JUDGE=${SIGNAL:+--gold $SIGNAL}
KIND=${KIND:+--kind $KIND}
PICK=${PICK:-64}
STEPS=${STEPS:-20}
SETTINGS=${SETTINGS:-examples/quickstart}

if [ ! -d "$NEXT/rankings" ]; then
    rlhf round --db "$DB" --policy "$LAST/ppo" --reference "$FIRST/reference" --reward "$LAST/reward" --pick "$PICK"
    $ANNOTATE
    rlhf export --db "$DB" --out "$NEXT/rankings" $KIND
fi
rlhf train-reward --config "$SETTINGS/reward.yaml" --rankings "$NEXT/rankings" --model "$MODEL" --out "$NEXT/reward" --resume
rlhf reference --config "$SETTINGS/reference.yaml" --prompts "$NEXT/rankings" --model "$LAST/ppo/policy" --reward "$NEXT/reward" --out "$NEXT/reference" --resume
rlhf ppo --config "$SETTINGS/ppo.yaml" --model "$LAST/ppo/policy" --reward "$NEXT/reward" --reference "$NEXT/reference" --steps "$STEPS" --out "$NEXT/ppo" --resume
rlhf evaluate --policy "$NEXT/ppo" --reference "$FIRST/reference" --reward "$NEXT/reward" --against "$LAST/ppo" $JUDGE --out "$NEXT/evaluate" --resume
