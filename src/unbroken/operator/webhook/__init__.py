"""The admission webhook of jobs: registration, certificates, and its own server process."""
