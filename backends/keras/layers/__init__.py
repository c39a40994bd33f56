"""The formats that each layer of a model computes in and returns: decided from a policy, and set on the layer."""
