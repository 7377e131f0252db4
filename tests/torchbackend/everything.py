"""Every scenario there is: importing this registers them."""

from tests.torchbackend import faults, functional, groups, messages, sharding, training, verbs

AREAS = (training, sharding, functional, verbs, messages, groups, faults)
