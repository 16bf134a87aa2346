"""Tasks: problems and their prompts, graders, environments, and the workers that run graders and environments.

Problems      `gsm8k`, `reasoning` and `jsonl` read or generate rows, `problems` poses them, `prompts` orders them.
Graders       `graders` finds a task's rewards and has the built-in graders; `rewards` calls a user's functions; `code_grader`
              (with `code_runner`) runs code, `judge` asks a language model; `grader_pool` runs graders in workers.
Environments  `environments` has them; `environment_pool` runs them in workers.
Workers       `worker_pool` is the pool, `workers` are threads, processes and Ray actors, `worker_process` is a process's program;
              `async_workers` and `async_worker_process` run many calls that wait on one event loop.
"""
