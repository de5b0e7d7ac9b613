"""Dimension legend and tensor aliases used in every signature.

===== =========================================================================
B     batch: the product of all leading dimensions
H     query heads;  Hkv: key/value heads, Hkv divides H (grouped queries)
G     queries per key/value head, G = H / Hkv
L     queries (target length)
S     keys (source length)
D     width of a query or key head
V     width of a value head
M     features of a feature map
C     width of the model (``embed_dim``)
===== =========================================================================

The aliases are plain tensors to a type checker; their annotation is the shape document.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

__all__ = ["Features", "KeyMask", "Keys", "Output", "Queries", "Values", "Weights"]

Queries = Annotated[Tensor, "... H L D"]
Keys = Annotated[Tensor, "... Hkv S D"]
Values = Annotated[Tensor, "... Hkv S V"]
Output = Annotated[Tensor, "... H L V"]
Weights = Annotated[Tensor, "... H L S"]
KeyMask = Annotated[Tensor, "... S"]
Features = Annotated[Tensor, "... M"]
