"""The graph rewrite, by both of its names."""

import tensorflow as tf
import polyamp

opt = tf.compat.v1.train.AdamOptimizer()
opt = polyamp.backends.tensorflow.enable_mixed_precision_graph_rewrite(opt)


def create_optimizer(lr, use_fp16=False):
    optimizer = tf.keras.optimizers.Adam(lr)
    if use_fp16:
        optimizer = polyamp.backends.tensorflow.enable_mixed_precision_graph_rewrite(optimizer, loss_scale='dynamic')
    return optimizer


def fixed(optimizer, value):
    loss_scaler = polyamp.LossScale.fixed(value)
    return polyamp.backends.tensorflow.enable_mixed_precision_graph_rewrite(optimizer, loss_scaler)


def dynamic(optimizer):
    return polyamp.backends.tensorflow.enable_mixed_precision_graph_rewrite(
        optimizer, polyamp.LossScale.like("tensorflow", init=2**10, interval=1000)
    )


made = [create_optimizer(0.1, use_fp16=True), fixed(tf.keras.optimizers.SGD(), 128.0), dynamic(tf.keras.optimizers.SGD())]
scales = [float(one.loss_scale) for one in made]
