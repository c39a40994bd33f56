"""TensorFlow's names for the canonical operations of `polyamp.operations`: node types, as in ``NodeDef.op``."""

from __future__ import annotations

from polyamp.operations import by_native_name

OPERATIONS: dict[str, str] = by_native_name(
    {
        # lower
        "matmul": "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum SparseMatMul SparseTensorDenseMatMul "
        "_FusedMatMul Pmlp Tmlp TmlpV2 TmlpV3",
        "conv": "Conv Conv2D Conv2DBackpropFilter Conv2DBackpropFilterV2 Conv2DBackpropInput Conv2DBackpropInputV2 "
        "Conv3D Conv3DBackpropFilter Conv3DBackpropFilterV2 Conv3DBackpropInput Conv3DBackpropInputV2 "
        "DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput "
        "FusedConv2DBiasActivation FusedPadConv2D FusedSparseConvGpuV2 _FusedConv2D",
        "attention": "Mha MhaV2",
        "lstm_cell": "BlockLSTM BlockLSTMGrad BlockLSTMV2 BlockLSTMGradV2 LSTMBlockCell LSTMBlockCellGrad",
        "gru_cell": "GRUBlockCell GRUBlockCellGrad",
        "rnn_cell": "CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3",
        # full: exponentials, logarithms, powers
        "exp": "Exp",
        "expm1": "Expm1",
        "log": "Log",
        "log1p": "Log1p",
        "pow": "Pow",
        "square": "Square",
        "squared_difference": "SquaredDifference",
        "rsqrt": "Rsqrt RsqrtGrad",
        "reciprocal": "Reciprocal ReciprocalGrad Inv InvGrad",
        # full: reductions
        "sum": "Sum SegmentSum SegmentSumV2 UnsortedSegmentSum",
        "mean": "Mean",
        "prod": "Prod",
        "cumsum": "Cumsum",
        "cumprod": "Cumprod",
        "logcumsumexp": "CumulativeLogsumexp",
        "norm": "L2Loss EuclideanNorm",
        # full: normalisation and losses
        "softmax": "Softmax",
        "log_softmax": "LogSoftmax",
        "batch_norm": "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 FusedBatchNormGrad FusedBatchNormGradV2 "
        "FusedBatchNormGradV3 _FusedBatchNormEx",
        "local_response_norm": "LRN LRNGrad",
        "cross_entropy": "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
        "ctc_loss": "CTCLoss CTCLossV2",
        # full: steep or unbounded functions
        "acos": "Acos",
        "asin": "Asin",
        "tan": "Tan",
        "sinh": "Sinh",
        "cosh": "Cosh",
        "sin": "Sin",
        "cos": "Cos",
        "acosh": "Acosh",
        "atanh": "Atanh",
        "erf_inv": "Erfinv",
        "softplus": "Softplus SoftplusGrad",
        "xlogy": "Xlogy Xlog1py Xdivy",
        "lgamma": "Lgamma",
        "digamma": "Digamma",
        "polygamma": "Polygamma",
        "igamma": "Igamma Igammac IgammaGradA",
        "beta": "Betainc",
        "bessel": "BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK1 BesselY0 BesselY1",
        "zeta": "Zeta",
        # full: linear algebra, transforms, positions
        "cholesky": "Cholesky CholeskyGrad",
        "qr": "Qr",
        "svd": "Svd",
        "eigh": "Eig SelfAdjointEig SelfAdjointEigV2",
        "lu": "Lu",
        "solve": "MatrixSolve TridiagonalSolve",
        "triangular_solve": "MatrixTriangularSolve BandedTriangularSolve",
        "inverse": "MatrixInverse",
        "lstsq": "MatrixSolveLs",
        "det": "MatrixDeterminant LogMatrixDeterminant",
        "matrix_exp": "MatrixExponential",
        "fft": "FFT FFT2D FFT3D FFTND IFFT IFFT2D IFFT3D IFFTND RFFT RFFT2D RFFT3D RFFTND IRFFT IRFFT2D IRFFT3D "
        "IRFFTND",
        "complex": "Complex",
        "interpolate": "ResizeNearestNeighbor ResizeNearestNeighborGrad ResizeBilinear ResizeBilinearGrad "
        "ResizeBicubic ResizeBicubicGrad ResizeArea ScaleAndTranslate ScaleAndTranslateGrad",
        "grid_sample": "CropAndResize CropAndResizeGradImage CropAndResizeGradBoxes",
        "fake_quantize": "FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars "
        "FakeQuantWithMinMaxVarsGradient QuantizeAndDequantizeV4",
        "save": "SaveV2",
        # promote
        "concat": "Concat ConcatV2 DynamicStitch ParallelDynamicStitch",
        "stack": "Pack",
        "scatter": "ScatterNd TensorScatterUpdate TensorStridedSliceUpdate MatrixSetDiagV3",
        "scatter_add": "TensorScatterAdd TensorScatterSub",
        "atan2": "Atan2",
        "cross_product": "Cross",
        # follow
        "add": "Add AddV2 AddN AccumulateNV2 BiasAdd BiasAddV1 BiasAddGrad",
        "sub": "Sub",
        "mul": "Mul MulNoNan",
        "div": "RealDiv Div DivNoNan",
        "floor_div": "FloorDiv",
        "remainder": "FloorMod Mod TruncateMod",
        "sqrt": "Sqrt SqrtGrad",
        "sigmoid": "Sigmoid SigmoidGrad",
        "tanh": "Tanh TanhGrad",
        "elu": "Elu EluGrad",
        "selu": "Selu SeluGrad",
        "leaky_relu": "LeakyRelu LeakyReluGrad",
        "softsign": "Softsign SoftsignGrad",
        "erf": "Erf",
        "erfc": "Erfc",
        "atan": "Atan",
        "asinh": "Asinh",
        "avg_pool": "AvgPool AvgPoolGrad AvgPool3D AvgPool3DGrad",
        "all_reduce": "CollectiveReduce CollectiveReduceV2 CollectiveReduceV3 NcclAllReduce CrossReplicaSum",
        # neutral
        "reshape": "Reshape Squeeze ExpandDims",
        "transpose": "Transpose ConjugateTranspose",
        "broadcast": "BroadcastTo",
        "tile": "Tile",
        "flip": "Reverse ReverseV2 ReverseSequence",
        "slice": "Slice StridedSlice StridedSliceGrad",
        "split": "Split SplitV Unpack",
        "gather": "Gather GatherNd GatherV2 ResourceGather ResourceGatherNd DynamicPartition",
        "space_to_depth": "SpaceToDepth DepthToSpace SpaceToBatch SpaceToBatchND BatchToSpace BatchToSpaceND",
        "pad": "Pad PadV2 MirrorPad MirrorPadGrad",
        "roll": "Roll",
        "unfold": "ExtractImagePatches ExtractVolumePatches",
        "diagonal": "Diag DiagPart MatrixDiag MatrixDiagV3 MatrixDiagPart MatrixDiagPartV3 MatrixBandPart",
        "identity": "Identity IdentityN Snapshot StopGradient PreventGradient CheckNumerics EnsureShape DeepCopy",
        "fill": "Fill OnesLike ZerosLike",
        "one_hot": "OneHot",
        "tensor_list": "TensorListConcat TensorListConcatLists TensorListConcatV2 TensorListFromTensor "
        "TensorListGather TensorListGetItem TensorListPopBack TensorListPushBack TensorListPushBackBatch "
        "TensorListScatter TensorListScatterIntoExistingList TensorListScatterV2 TensorListSetItem TensorListSplit "
        "TensorListStack",
        "loop_edge": "Enter Exit Merge NextIteration Switch",
        "all_gather": "CollectiveGather CollectiveGatherV2",
        "all_to_all": "AllToAll CollectiveAllToAllV3",
        "collective_permute": "CollectivePermute",
        "where": "Select SelectV2",
        "clip": "ClipByValue",
        "maximum": "Maximum",
        "minimum": "Minimum",
        "max": "Max",
        "min": "Min",
        "argmax": "ArgMax ArgMin",
        "top_k": "TopK TopKV2 NthElement",
        "nonzero": "Where",  # the positions of what is true; tf.where with three arguments is SelectV2
        "compare": "Equal NotEqual Less LessEqual Greater GreaterEqual ApproximateEqual Bucketize",
        "is_finite": "IsFinite IsInf IsNan",
        "relu": "Relu ReluGrad Relu6 Relu6Grad",
        "max_pool": "MaxPool MaxPoolV2 MaxPoolGrad MaxPoolGradV2 MaxPoolGradGrad MaxPoolGradGradV2 MaxPool3D "
        "MaxPool3DGrad MaxPool3DGradGrad MaxPoolWithArgmax MaxPoolGradWithArgmax",
        "segment_max": "SegmentMax UnsortedSegmentMax SegmentMin UnsortedSegmentMin FastUnsortedSegmentMax VoxelMax",
        "abs": "Abs",
        "neg": "Neg",
        "sign": "Sign",
        "round": "Round Floor Ceil Rint",
        # keep
        "cast": "Cast",
        "bitcast": "Bitcast NextAfter",
        "shape": "Shape ShapeN Size Rank BroadcastGradientArgs BroadcastArgs VariableShape ConcatOffset",
        "integer": "BitwiseAnd BitwiseOr BitwiseXor Invert LeftShift RightShift PopulationCount Range Bincount "
        "DenseBincount InvertPermutation TruncateDiv",
        "logical": "LogicalAnd LogicalOr LogicalNot All Any",
        "random": "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal RandomShuffle RandomGamma "
        "Multinomial StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomUniformInt StatelessRandomNormal "
        "StatelessRandomNormalV2 StatelessTruncatedNormal StatelessTruncatedNormalV2 StatelessRandomGetKeyCounter "
        "StatefulUniform StatefulStandardNormalV2",
        "quantize": "QuantizeV2 Dequantize",
        "complex_part": "Real Imag Conj Angle ComplexAbs",
        "constant": "Const LinSpace Empty",
        "variable": "VarHandleOp ReadVariableOp AssignVariableOp AssignAddVariableOp AssignSubVariableOp Variable "
        "VariableV2 Assign AssignAdd AssignSub Placeholder PlaceholderWithDefault",
        "optimizer_update": "ApplyGradientDescent ApplyMomentum ApplyAdam ApplyAdagrad ApplyRMSProp ApplyFtrl "
        "ResourceApplyGradientDescent ResourceApplyMomentum ResourceApplyKerasMomentum ResourceApplyAdam "
        "ResourceApplyAdamWithAmsgrad ResourceApplyAdagrad ResourceApplyAdagradV2 ResourceApplyRMSProp "
        "ResourceApplyCenteredRMSProp ResourceApplyAdadelta ResourceApplyAdaMax ResourceApplyFtrl "
        "ResourceApplyFtrlV2 ResourceScatterAdd ResourceSparseApplyMomentum ResourceSparseApplyAdagradV2",
        "call": "PartitionedCall StatefulPartitionedCall",
        "cond": "If StatelessIf Case StatelessCase",
        "while_loop": "While StatelessWhile ReduceDataset ScanDataset",
        "custom_call": "PyFunc PyFuncStateless EagerPyFunc",
        "token": "NoOp ControlTrigger",
    }
)
