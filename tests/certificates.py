"""Certificate authorities for tests, and what ranks get from them: files, as users have them. Knows trustme, not meshes."""

import functools
import tempfile
from pathlib import Path

import trustme

import asynccoll


class Authority:
    """A CA of its own; its files are in ``directory``."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self._made = 0
        self._ca = trustme.CA()
        self.cafile = self.directory / f"ca-{id(self)}.pem"
        self._ca.cert_pem.write_to_path(str(self.cafile))

    def certificate(self, *names, **validity):
        """A file with a private key and its certificate for ``names``."""
        self._made += 1
        path = self.directory / f"rank-{id(self)}-{self._made}.pem"
        issued = self._ca.issue_cert(*names or ("127.0.0.1",), **validity)
        issued.private_key_and_cert_chain_pem.write_to_path(str(path))
        return path

    def contexts(self, *names, trusts=None, check_hostname=False, **validity):
        """What `asynccoll.tls` makes of a new certificate for ``names``. ``trusts``: whose certificates are accepted."""
        cafile = (trusts or self).cafile
        return asynccoll.tls(
            self.certificate(*names, **validity), cafile=cafile, check_hostname=check_hostname
        )


@functools.cache
def contexts():
    """A good pair of contexts for ranks on loopback."""
    with tempfile.TemporaryDirectory() as directory:
        return Authority(directory).contexts("127.0.0.1", "::1", "localhost")
