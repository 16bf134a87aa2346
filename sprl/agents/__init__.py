"""An OpenAI-compatible endpoint over the engine, and the agent programs that talk to it (docs/agents.md)."""
