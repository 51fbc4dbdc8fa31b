"""Prompts with their responses, and what a reward model makes of them, packed or padded."""

import torch

from reward.data.batches import lay_out
from reward.data.groups import Group

GROUPS = [
    Group("a", tuple(range(2, 20)), ((20, 21, 22), (23,), (24, 25)), ()),
    Group("b", (5, 6), ((30, 31, 0), (32, 33, 34, 35, 36)), ()),
    Group("c", (7, 8, 9), ((40,),), ()),
    Group("d", (7, 8, 10), ((), (41, 42)), ()),
]


def rewards_and_gradients(module, groups, *, shared):
    """The reward of every response, and the gradients of their sum with the weights 1, 2, 3, …"""
    module.zero_grad()
    rewards = module(lay_out(groups, 0, shared=shared).to(module.classifier.device))
    weights = torch.arange(1, len(rewards) + 1).to(rewards)
    (rewards * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    return rewards.detach(), gradients
