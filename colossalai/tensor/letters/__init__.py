"""What each operation does with a tensor that is cut: a table of dim letters."""

from colossalai.tensor.letters import norms, pointwise, products, shapes
from colossalai.tensor.letters.calls import call_of_node
from colossalai.tensor.letters.table import (
    WHOLE,
    OpCall,
    Operand,
    OpLetters,
    has_letters,
    letters_of,
    register_letters,
)

__all__ = [
    "WHOLE",
    "OpCall",
    "OpLetters",
    "Operand",
    "call_of_node",
    "has_letters",
    "letters_of",
    "norms",
    "pointwise",
    "products",
    "register_letters",
    "shapes",
]
