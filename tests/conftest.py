"""What every test shares: no hub, one thread, nothing measured unasked."""

from __future__ import annotations

import os

# Set before anything imports a library that reads them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("SUBQUAD_TUNE", "off")  # "auto" measures where a test asks for it

import torch  # after the variables above

torch.set_num_threads(1)
