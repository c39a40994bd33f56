"""tf.keras.mixed_precision.experimental, as programs of 2020 have it."""

import tensorflow as tf
import polyamp

policy = tf.keras.mixed_precision.Policy('mixed_float16')
tf.keras.mixed_precision.set_global_policy(policy)
optimizer = polyamp.wrap_optimizer(tf.keras.optimizers.Adam(), "mixed_float16", loss_scale=polyamp.LossScale.like("keras"))
fixed = polyamp.wrap_optimizer(tf.keras.optimizers.SGD(), "mixed_float16", loss_scale=128.0)
again = tf.keras.mixed_precision.Policy('mixed_float16')
