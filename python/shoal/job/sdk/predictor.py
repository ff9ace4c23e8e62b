"""Clients of an endpoint: Predictor and its kinds; and Model, which starts an endpoint from a model.tar.gz. Names and arguments
are those of the SageMaker Python SDK v2.

An endpoint is a process of serve.py that ends with the process that deployed it. That process finds it by its name, others by
its URL."""
from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from typing import Any, Dict, Optional, Type

from shoal.job.document import JobError
from shoal.job.sdk.serializers import (BaseDeserializer, BaseSerializer, BytesDeserializer, IdentitySerializer, JSONDeserializer,
                          JSONSerializer, NumpyDeserializer, NumpySerializer)

ANSWER_SECONDS_MAX = 70.0  # as boto's
ERROR_TEXT_MAX = 4096
# Arguments of a model without a meaning here.
IGNORED = ("role", "image_uri", "vpc_config", "dependencies", "framework_version", "py_version", "model_kms_key",
           "enable_network_isolation", "container_log_level", "code_location", "sagemaker_session")
_HEADERS = {"target_model": "X-Amzn-SageMaker-Target-Model", "target_variant": "X-Amzn-SageMaker-Target-Variant",
            "inference_id": "X-Amzn-SageMaker-Inference-Id", "custom_attributes": "X-Amzn-SageMaker-Custom-Attributes"}
# Requests to this machine use no proxy.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ModelError(RuntimeError):
    """The model, or a function of the script, failed; `body` is the endpoint's answer."""

    def __init__(self, code: int, body: str):
        super().__init__("An error occurred (ModelError) when calling the InvokeEndpoint operation: "
                         f'Received {"client" if code < 500 else "server"} error ({code}) from primary with message "{body}"')
        self.code, self.body = code, body


_endpoints: Dict[str, Any] = {}  # serve.Endpoint by name


# ------------------------------------------------------------ predictors

class Predictor:
    """Sends requests to an endpoint. `endpoint_name` is the name that deploy() chose or got, or a URL."""

    def __init__(self, endpoint_name: str, sagemaker_session: Any = None, serializer: Optional[BaseSerializer] = None,
                 deserializer: Optional[BaseDeserializer] = None, component_name: Optional[str] = None, **kwargs: Any):
        self.endpoint_name = endpoint_name
        self.sagemaker_session = sagemaker_session
        self.serializer = serializer or IdentitySerializer()
        self.deserializer = deserializer or BytesDeserializer()
        self.component_name = component_name

    @property
    def url(self) -> str:
        """The address on which the endpoint listens."""
        if re.match(r"https?://", self.endpoint_name):
            return self.endpoint_name.rstrip("/")
        return self._endpoint().url

    def _endpoint(self) -> Any:
        if self.endpoint_name not in _endpoints:
            raise JobError(f'no endpoint "{self.endpoint_name}": this process has not deployed it, or has deleted it; the '
                           f"endpoint of another process is asked by its URL")
        return _endpoints[self.endpoint_name]

    @property
    def content_type(self) -> str:
        return self.serializer.CONTENT_TYPE

    @property
    def accept(self) -> Any:
        return self.deserializer.ACCEPT

    def predict(self, data: Any, initial_args: Optional[Dict[str, Any]] = None, target_model: Optional[str] = None,
                target_variant: Optional[str] = None, inference_id: Optional[str] = None,
                custom_attributes: Optional[str] = None, component_name: Optional[str] = None) -> Any:
        """Returns the endpoint's answer to data. Raises ModelError if the answer is an error."""
        given = dict(initial_args or {})
        headers = {"Content-Type": given.get("ContentType") or self.content_type,
                   "Accept": given.get("Accept") or ", ".join(self.deserializer.ACCEPT)}
        asked = {"target_model": target_model, "target_variant": target_variant, "inference_id": inference_id,
                 "custom_attributes": custom_attributes or given.get("CustomAttributes")}
        headers.update({_HEADERS[name]: value for name, value in asked.items() if value is not None})
        body = self.serializer.serialize(data)
        answer = self._ask(body.encode("utf-8") if isinstance(body, str) else body, headers)
        return self.deserializer.deserialize(answer, answer.headers.get("Content-Type", ""))

    def _ask(self, body: Any, headers: Dict[str, str]) -> Any:
        url = self.url
        request = urllib.request.Request(f"{url}/invocations", data=body, headers=headers, method="POST")
        try:
            return _opener.open(request, timeout=ANSWER_SECONDS_MAX)
        except urllib.error.HTTPError as error:
            with error:
                raise ModelError(error.code, error.read(ERROR_TEXT_MAX).decode("utf-8", "replace")) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise JobError(f'endpoint "{self.endpoint_name}" at {url} does not answer: {reason}; deploy it again') from None

    def delete_endpoint(self, delete_endpoint_config: bool = True) -> None:
        """Ends the endpoint. Deleting a missing one is an error, as with SageMaker."""
        self._endpoint().stop()
        del _endpoints[self.endpoint_name]

    def delete_predictor(self, wait: bool = False) -> None:
        self.delete_endpoint()

    def delete_model(self) -> None:
        """Does nothing: a model here is the archive of its job, which stays."""


class PyTorchPredictor(Predictor):
    """Sends and receives arrays."""

    def __init__(self, endpoint_name: str, sagemaker_session: Any = None, serializer: Optional[BaseSerializer] = None,
                 deserializer: Optional[BaseDeserializer] = None, component_name: Optional[str] = None):
        super().__init__(endpoint_name, sagemaker_session, serializer or NumpySerializer(), deserializer or NumpyDeserializer(),
                         component_name)


class TensorFlowPredictor(Predictor):
    """Sends and receives JSON. `model_name` and `model_version` select a SavedModel, by default the newest version."""

    def __init__(self, endpoint_name: str, sagemaker_session: Any = None, serializer: Optional[BaseSerializer] = None,
                 deserializer: Optional[BaseDeserializer] = None, model_name: Optional[str] = None,
                 model_version: Optional[str] = None, component_name: Optional[str] = None, **kwargs: Any):
        super().__init__(endpoint_name, sagemaker_session, serializer or JSONSerializer(), deserializer or JSONDeserializer(),
                         component_name)
        selected = {"tfs-model-name": model_name, "tfs-model-version": model_version}
        self._attributes = ",".join(f"{name}={value}" for name, value in selected.items() if value)

    def predict(self, data: Any, initial_args: Optional[Dict[str, Any]] = None, **named: Any) -> Any:
        """Returns the endpoint's answer. `initial_args["CustomAttributes"]` precedes the name and version."""
        given = dict(initial_args or {})
        attributes = [given.get("CustomAttributes"), self._attributes]
        given["CustomAttributes"] = ",".join(one for one in attributes if one) or None
        return super().predict(data, given, **named)


# ------------------------------------------------------------ models

class Model:
    """A model.tar.gz and the script that serves it."""

    predictor_cls: Type[Predictor] = Predictor

    def __init__(self, model_data: str, role: Any = None, entry_point: Optional[str] = None, source_dir: Optional[str] = None,
                 name: Optional[str] = None, predictor_cls: Optional[Type[Predictor]] = None,
                 env: Optional[Dict[str, str]] = None, model_server_workers: Optional[int] = None, **kwargs: Any):
        for word in kwargs:
            if word not in IGNORED:
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument '{word}'")
        self.model_data, self.entry_point, self.source_dir, self.name = model_data, entry_point, source_dir, name
        self.env, self.model_server_workers = env, model_server_workers
        self.predictor_cls = predictor_cls or self.predictor_cls
        self.endpoint_name: Optional[str] = None

    def deploy(self, initial_instance_count: Any = None, instance_type: Any = None,
               serializer: Optional[BaseSerializer] = None, deserializer: Optional[BaseDeserializer] = None,
               endpoint_name: Optional[str] = None, port: int = 0) -> Predictor:
        """Starts an endpoint on this machine and returns when its model is loaded. `port` 0 chooses a free one."""
        from shoal.job.serving import serve
        name = endpoint_name or self._name_make()
        if name in _endpoints:
            raise JobError(f'there is an endpoint "{name}" already; delete it, or choose another name')
        _endpoints[name] = serve.start(self.model_data, self.entry_point, self.source_dir, port, environment=self.env,
                                       workers=self.model_server_workers or 1)
        self.endpoint_name = name
        predictor = self.predictor_cls(name)
        predictor.serializer = serializer or predictor.serializer
        predictor.deserializer = deserializer or predictor.deserializer
        return predictor

    def _name_make(self) -> str:
        now = time.time()
        stamp = time.strftime("%Y-%m-%d-%H-%M-%S", time.gmtime(now))
        return f"{self.name or 'endpoint'}-{stamp}-{int(now * 1000) % 1000:03d}"


class PyTorchModel(Model):
    """Its predictor sends arrays."""

    predictor_cls = PyTorchPredictor


class TensorFlowModel(Model):
    """Its predictor sends JSON."""

    predictor_cls = TensorFlowPredictor
