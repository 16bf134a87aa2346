"""A response and its parts, as plain dataclasses with the fields of the real ones."""

from dataclasses import dataclass


@dataclass
class Tool:
  name: str
  description: str
  parameters: dict


@dataclass
class ToolCall:
  id: str
  name: str
  arguments: str


@dataclass
class ResponseMessage:
  content: str
  finish_reason: str
  is_truncated: bool
  tool_calls: list | None = None


@dataclass
class Response:
  id: str
  created: int
  model: str
  message: ResponseMessage
