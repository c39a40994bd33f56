"""tf.keras.mixed_precision.experimental, as programs of 2020 have it."""

import tensorflow as tf
from tensorflow.keras.mixed_precision import experimental as mixed_precision

policy = mixed_precision.Policy('mixed_float16')
mixed_precision.set_policy(policy)
optimizer = mixed_precision.LossScaleOptimizer(tf.keras.optimizers.Adam(), loss_scale='dynamic')
fixed = tf.keras.mixed_precision.experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale=128)
again = tf.keras.mixed_precision.experimental.Policy('mixed_float16', loss_scale='dynamic')
