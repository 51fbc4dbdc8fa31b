"""Demonstrations to fine-tune on, one of each form."""

LINES = [
    {"prompt": "How was the trip?", "completion": "The weather was lovely."},
    {"messages": [
        {"role": "user", "content": "And the food?"},
        {"role": "assistant", "content": "We loved the warm food."},
    ]},
    {"prompt": [{"role": "user", "content": "The dog?"}], "completion": "The dog was kind."},
    {"prompt": "The house?", "completion": [{"role": "assistant", "content": "A cold, sad room."}]},
]  # fmt: skip
