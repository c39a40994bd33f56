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
