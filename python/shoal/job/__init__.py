"""Training jobs: what is trained, where, with which `distribution`, on which data; docs/jobs.md is the manual.

A job is one document (document.py). The estimators write it, the command `shoal job` reads it, and everything that happens lies in
one folder per job (folder.py)."""
