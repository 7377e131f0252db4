"""The verbs, as mixins of `asynccoll.Communicator`: signatures and documentation. What a call becomes is in `asynccoll.calls`."""
