"""Every scenario there is: importing this registers them, and loads what they need before processes are forked."""

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.tensor

import asynccoll.torch.backend
from tests.torchbackend import faults, functional, groups, messages, sharding, training, verbs

AREAS = (training, sharding, functional, verbs, messages, groups, faults)
LOADED = (torch._dynamo, asynccoll.torch.backend)
