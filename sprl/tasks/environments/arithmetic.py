"""A calculator for text that a model wrote: numbers, + - * / // % **, brackets. It is exact, and bounded in size and depth.

Python's parser reads the text, but Python does not run it: seven operators act on fractions of bounded size. 0.1 + 0.2 is 0.3.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_LENGTH = 200  # characters of an expression
MAX_DEPTH = 40  # nested operations and signs
MAX_BITS = 512  # of any numerator or denominator, about 150 digits
MAX_EXPONENT = 64

_ALLOWED = re.compile(r'[0-9.+\-*/%()\s]*')  # no letters, so no names, attributes or calls
_COMMA = re.compile(r'(?<=[0-9]),(?=[0-9]{3}(?![0-9]))')  # thousands commas
_SIGNS = str.maketrans({'×': '*', '·': '*', '÷': '/', '−': '-', '–': '-', '$': None, '€': None, '£': None})


class CalculationError(ValueError):
  """An expression that is refused or has no value. The message is shown to the model."""


def calculate(text: str) -> str:
  """Return the value of an expression: exact with at most 12 decimals, else to 12 significant digits.

  Raises CalculationError for more than MAX_LENGTH characters, anything but arithmetic, division by zero, and too large numbers.
  """
  if len(text) > MAX_LENGTH:
    raise CalculationError(f'the expression is longer than {MAX_LENGTH} characters')
  plain = ' '.join(_COMMA.sub('', text.translate(_SIGNS)).split())
  if not plain:
    raise CalculationError('the expression is empty')
  if not _ALLOWED.fullmatch(plain):
    raise CalculationError('only numbers, + - * / // % ** and brackets are understood')
  try:
    tree = ast.parse(plain, mode='eval')
  except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two come from deep nesting
    raise CalculationError(f'{plain} is not a well-formed expression') from None
  return _written(_value(plain, tree.body, 0))


def _value(plain: str, node: ast.AST, depth: int) -> Fraction:
  if depth > MAX_DEPTH:
    raise CalculationError('the expression is nested too deeply')
  match node:
    case ast.Constant(value=int() | float(), col_offset=start, end_col_offset=end):
      return _small(Fraction(plain[start:end]))  # the decimal as written, not its binary neighbour
    case ast.UnaryOp(op=ast.USub(), operand=operand):
      return -_value(plain, operand, depth + 1)
    case ast.UnaryOp(op=ast.UAdd(), operand=operand):
      return _value(plain, operand, depth + 1)
    case ast.BinOp(left=left, op=ast.Pow(), right=right):
      return _power(_value(plain, left, depth + 1), _value(plain, right, depth + 1))
    case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
      try:
        return _small(_OPERATORS[type(op)](_value(plain, left, depth + 1), _value(plain, right, depth + 1)))
      except ZeroDivisionError:
        raise CalculationError('division by zero') from None
    case ast.Call():
      raise CalculationError('a product is written with *')
  raise CalculationError('only numbers, + - * / // % ** and brackets are understood')


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
}


def _power(base: Fraction, exponent: Fraction) -> Fraction:
  if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
    raise CalculationError(f'an exponent is a whole number from -{MAX_EXPONENT} to {MAX_EXPONENT}')
  if base == 0 and exponent < 0:
    raise CalculationError('division by zero')
  return _small(base**exponent.numerator)  # at most MAX_BITS * MAX_EXPONENT bits before the check


def _small(value: Fraction | int) -> Fraction:
  value = Fraction(value)
  if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
    raise CalculationError('the numbers become too large')
  return value


def _written(value: Fraction) -> str:
  if value.denominator == 1:
    return str(value.numerator)
  scaled = value * 10**12
  if scaled.denominator > 1:
    return f'{float(value):.12g}'
  digits = f'{abs(scaled.numerator):013d}'
  return f'{"-" if value < 0 else ""}{digits[:-12]}.{digits[-12:]}'.rstrip('0')
