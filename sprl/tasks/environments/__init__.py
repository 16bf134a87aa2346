"""Environments: multi-turn tasks that a model acts in and is rewarded by.

`protocol` defines an environment, checks what one returns, and converts it to messages; `play` tries one with random actions.
Shipped: `frozen_lake`, `sokoban`, `guess_number`, `calculator` (with `arithmetic`); `turns` counts their actions.
Adapters: `single_turn` (problems and a grader), `from_gem`, `chat` (the form of SkyRL-gym), `user_file`.
For tests and simulations: `latency` injects delays and faults. `registry` makes any environment by name.

Environments run on the host, in the thread or process that calls them. One environment plays one episode at a time.
"""
