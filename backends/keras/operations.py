"""The canonical operation of each Keras layer class, by which a layer's dtype policy is decided."""

from __future__ import annotations

from polyamp.operations import by_native_name

OPERATIONS: dict[str, str] = by_native_name(
    {
        # lower
        "matmul": "Dense EinsumDense Dot ReversibleEmbedding",
        "conv": "Conv1D Conv2D Conv3D Conv1DTranspose Conv2DTranspose Conv3DTranspose DepthwiseConv1D "
        "DepthwiseConv2D SeparableConv1D SeparableConv2D ConvLSTM1D ConvLSTM2D ConvLSTM3D",
        "attention": "Attention AdditiveAttention MultiHeadAttention GroupQueryAttention GroupedQueryAttention",
        "lstm_cell": "LSTM LSTMCell",
        "gru_cell": "GRU GRUCell",
        "rnn_cell": "SimpleRNN SimpleRNNCell RNN StackedRNNCells",
        "prelu": "PReLU",
        # inner
        "batch_norm": "BatchNormalization Normalization",
        "layer_norm": "LayerNormalization",
        "group_norm": "GroupNormalization",
        "rms_norm": "RMSNormalization",
        "avg_pool": "AveragePooling1D AveragePooling2D AveragePooling3D AdaptiveAveragePooling1D "
        "AdaptiveAveragePooling2D AdaptiveAveragePooling3D",
        # full
        "softmax": "Softmax",
        "norm": "UnitNormalization",
        "weight_norm": "SpectralNormalization",
        "mean": "GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D",
        "interpolate": "UpSampling1D UpSampling2D UpSampling3D Resizing",
        "fft": "STFTSpectrogram MelSpectrogram",
        # promote
        "concat": "Concatenate",
        # follow
        "add": "Add Average",
        "sub": "Subtract",
        "mul": "Multiply Rescaling GaussianNoise",
        "elu": "ELU",
        "leaky_relu": "LeakyReLU",
        "dropout": "Dropout SpatialDropout1D SpatialDropout2D SpatialDropout3D AlphaDropout GaussianDropout",
        # neutral
        "relu": "ReLU",
        "maximum": "Maximum",
        "minimum": "Minimum",
        "max": "GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D",
        "max_pool": "MaxPooling1D MaxPooling2D MaxPooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D "
        "AdaptiveMaxPooling3D",
        "embedding": "Embedding",
        "reshape": "Reshape Flatten",
        "transpose": "Permute",
        "tile": "RepeatVector",
        "pad": "ZeroPadding1D ZeroPadding2D ZeroPadding3D",
        "slice": "Cropping1D Cropping2D Cropping3D CenterCrop",
        "where": "Masking",
        "identity": "Identity ActivityRegularization InputLayer",
        "one_hot": "CategoryEncoding",
    }
)

_CANONICAL_ACTIVATIONS = (
    "log_softmax softplus log_sigmoid leaky_relu elu celu selu softsign gelu silu mish glu tanh sigmoid hard_sigmoid "
    "soft_shrink hard_shrink tanh_shrink"
)
ACTIVATIONS: dict[str, str] = by_native_name(
    {
        "softmax": "softmax sparsemax",
        "exp": "exponential",
        "identity": "linear",
        "relu": "relu relu6",
        "clip": "hard_tanh threshold",
        "hard_swish": "hard_silu",
        **{name: name for name in _CANONICAL_ACTIVATIONS.split()},
    }
)
"""The canonical operation of ``keras.layers.Activation``, by the name of its function in ``keras.activations``."""
