"""Where a token stands: positions as vectors to be added, or as rotations of queries and keys.

- `Sinusoidal`: sines and cosines of given frequencies, no parameters, any length.
- `Learned`: a vector for each of `max_length` positions.
- `Rotary`: turns pairs of channels of q and k, so that q·k depends on the distance.

`angles` is what the first and the last share. `position_ids` counts a padded batch's tokens.
"""

from subquad.positions.learned import Learned
from subquad.positions.rotary import Rotary
from subquad.positions.sinusoidal import Sinusoidal, angles, frequencies_of, position_ids

__all__ = ["Learned", "Rotary", "Sinusoidal", "angles", "frequencies_of", "position_ids"]
