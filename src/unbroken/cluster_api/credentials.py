"""The file of keys that may call the cluster API, in the form of `~/.aws/credentials`."""

from __future__ import annotations

import configparser
from pathlib import Path

from unbroken.errors import SpecError

from .signatures import Credential

KEY, SECRET, TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"


def credentials_text(credential: Credential) -> str:
    """The content of a file with one key, as `read_credentials` takes it."""
    return f"[default]\n{KEY} = {credential.key_id}\n{SECRET} = {credential.secret}\n"


def read_credentials(path: Path) -> dict[str, Credential]:
    """Credentials by key id; SpecError where the file has none or cannot be read.

    Errors quote no line of the file: it holds secrets.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read the credentials of the cluster API: {error}") from error
    except configparser.Error as error:
        raise SpecError(f"{path}: not in the form of ~/.aws/credentials") from error
    result = {}
    for name in parser.sections():
        section = parser[name]
        key, secret = section.get(KEY, ""), section.get(SECRET, "")
        if not key or not secret:
            raise SpecError(f"{path}: [{name}] needs {KEY} and {SECRET}")
        result[key] = Credential(key, secret, section.get(TOKEN, ""))
    if not result:
        raise SpecError(f"{path}: no credentials; write [NAME], {KEY} = ... and {SECRET} = ...")
    return result
