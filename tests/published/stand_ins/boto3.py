"""In place of boto3: every bucket is there."""
import types


def resource(_):
    return types.SimpleNamespace(meta=types.SimpleNamespace(client=types.SimpleNamespace(head_bucket=lambda Bucket: None)))
