"""Tells torch of the backend "asynccoll". Loaded by `import torch`, in every program of an environment that has asynccoll.

Nothing is imported that torch has not imported itself, and nothing is raised: an exception here would end `import torch`.
"""


def register() -> None:
    """The entry point of ``torch.backends``."""
    try:
        import torch.distributed as dist

        dist.Backend.register_backend("asynccoll", _create, extended_api=True, devices=["cpu"])
    except Exception:  # noqa: BLE001 (a torch without distributed has no backends: init_process_group says so)
        pass


def _create(options, group_options=None):  # type: ignore[no-untyped-def]  # torch is not imported here
    from asynccoll.torch.backend import create

    return create(options, group_options)
