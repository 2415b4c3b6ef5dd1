"""Trains an agent with PPO, whose rollout keeps graphs: agent.py list|buffers [fix]."""

import os
import sys

import torch
from torch import nn
from torch.distributions import Categorical

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 3))
ENVS, LENGTH = 64, 64


class Agent(nn.Module):
    def __init__(self, actions=6):
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU()),
        )
        self.actor, self.critic = nn.Linear(512, actions), nn.Linear(512, 1)

    def get_action_and_value(self, x, action=None):
        hidden = self.network(x / 255.0)
        probs = Categorical(logits=self.actor(hidden), validate_args=False)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden).flatten()


def rollout(agent):
    """Calls the policy once for each step of the environments. Keeps the results in lists, or in tensors as
    CleanRL does."""
    shape = (LENGTH, ENVS)
    obs = torch.zeros((*shape, 4, 84, 84), dtype=torch.uint8, device="cuda")
    actions, rewards = torch.zeros(shape, device="cuda"), torch.zeros(shape, device="cuda")
    logprobs, values = torch.zeros(shape, device="cuda"), torch.zeros(shape, device="cuda")
    all_logprobs, all_values = [], []
    for t in range(LENGTH):
        obs[t] = torch.randint(0, 255, (ENVS, 4, 84, 84), dtype=torch.uint8, device="cuda")
        with torch.set_grad_enabled(not FIX):
            action, logprob, _, value = agent.get_action_and_value(obs[t])
        actions[t] = action
        if KIND == "list":
            all_logprobs.append(logprob)
            all_values.append(value)
        else:
            logprobs[t] = logprob
            values[t] = value
    if KIND == "list":
        logprobs, values = torch.stack(all_logprobs), torch.stack(all_values)
    return obs, actions, logprobs, values, values.detach() + rewards


def train():
    agent = Agent().cuda()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4)
    for _ in range(STEPS):
        obs, actions, logprobs, values, returns = (part.flatten(0, 1) for part in rollout(agent))
        for part in torch.randperm(ENVS * LENGTH, device="cuda").split(512):
            _, new, entropy, value = agent.get_action_and_value(obs[part], actions[part])
            ratio = (new - logprobs[part].detach()).exp()
            policy_loss = -(ratio * (returns[part] - values[part].detach())).mean()
            loss = policy_loss + 0.5 * (value - returns[part]).square().mean() - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


train()
