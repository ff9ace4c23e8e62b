"""The interface of the SageMaker Python SDK v2: estimators, their inputs, predictors and serializers."""
