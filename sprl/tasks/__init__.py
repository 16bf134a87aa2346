"""Prompts, graders, and the pipeline that deals the prompts out.

Data: `problems` poses what `gsm8k`, `reasoning` and `jsonl` hold; `prompts` deals it out, shuffled and sharded.
Rewards: `graders` says what an answer is worth; `grading_pool` asks it in processes that may be killed (`grading_worker`).
Tasks of several turns: `environments`.
"""
