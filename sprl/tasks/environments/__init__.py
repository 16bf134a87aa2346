"""Environments: what a model talks to over several turns, and is rewarded by.

The form: `protocol` says what an environment is, checks what one returns, and puts it as messages; `play` tries any out.
Shipped: `frozen_lake`, `sokoban`, `guess_number`, and `calculator` (with `arithmetic`); `turns` counts their actions.
Of others: `single_turn` (problems and a grader; reasoning-gym), `from_gem`, `from_verifiers`, `chat` (SkyRL-gym's form),
`user_file` (a user's class).
For tests and simulations: `latency` injects delays and faults. `registry` makes any of them by name.

All of it runs on the host, in whatever thread or process calls it; one environment plays one episode at a time.
"""
