"""The loop of TensorFlow's guide to mixed precision."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow.keras import mixed_precision

digits = load_digits()
images, labels = (digits.data[:256] / 16).astype("float32"), digits.target[:256]
tf.keras.utils.set_random_seed(0)
mixed_precision.set_global_policy('mixed_float16')
model = tf.keras.Sequential([
    tf.keras.layers.Dense(32, activation='relu'),
    tf.keras.layers.Dense(10),
    tf.keras.layers.Activation('softmax', dtype='float32'),
])
optimizer = tf.keras.optimizers.RMSprop()
optimizer = mixed_precision.LossScaleOptimizer(optimizer)
loss_object = tf.keras.losses.SparseCategoricalCrossentropy()


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        predictions = model(x)
        loss = loss_object(y, predictions)
        scaled_loss = optimizer.get_scaled_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(scaled_gradients)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


losses = [
    float(train_step(x, y))
    for _ in range(4)
    for x, y in zip(np.split(images, 4), np.split(labels, 4))
]
