"""Faults of the CUDA kernels that their tests must find: each mutant is killed by a named test.

A mutant is the kernels with one piece of their source replaced, compiled for the emulator, and put
in the place of the registered NumPy backend; the named test of `test_cupy_kernels`, or of
`test_cupy_tensor`, is then called.
"""

import shutil

import pytest
import test_cupy_kernels as tests
import test_cupy_tensor as tensor_tests
from cuda_emulator import KERNELS, EmulatedBackend, Emulator, EmulatorFault
from emulated import BACKEND, CudaCall, put_in_place
from planted import Mutant, call, controls

ORACLE = "test_call_equals_oracle"


def oracle(*given, **options):
    """Return the arguments of `test_call_equals_oracle`."""
    return {"case": CudaCall(*given, **{"dtype": "float32", **options})}


EXACT = oracle("exact", (2, 1), (129, 129), (16, 16), 1, causal=True, flatter=9.0)
FULL = oracle("exact", (4, 2), (65, 129), (16, 16), 2)
WINDOW = oracle("window", (2, 1), (193, 193), (8, 8), 1)
LSH = oracle("lsh", (2, 1), (193, 193), (8, 8), 1, flatter=16.0)
MANY = oracle("lsh", (2, 1), (129, 129), (8, 8), 1, flatter=32.0, samples=40)
TABLE = oracle("set", (2, 1), (129, 193), (8, 8), 1, flatter=16.0)
SEGMENTS = oracle("exact", (2, 1), (65, 65), (8, 8), 1, segments="one")
BIG = oracle("exact", (1, 1), (65, 65), (40, 8), 1)
ROWS = oracle("exact", (2, 1), (65, 65), (8, 8), 2, slope_form="rows")
SHARED = oracle("exact", (2, 1), (65, 65), (8, 8), 2, slope_form="heads")
SCALED = oracle("exact", (2, 1), (65, 65), (8, 8), 1, scale=-0.7)
LAW = "test_law"
PADDING = {
    "name": "test_what_stands_in_padding_reaches_nothing",
    "arguments": {"method": "exact", "causal": True, "fill": float("nan")},
}
HIDDEN = {
    "name": "test_a_hidden_key_far_above_the_visible_ones_empties_no_row",
    "arguments": {"case": "future", "n": 77, "dtype": "float32"},
}
HALF = oracle("exact", (2, 1), (129, 129), (16, 8), 1, causal=True, dtype="float16")
HALF_APART = oracle("exact", (2, 1), (65, 100), (8, 8), 1, dtype="float16")
HALF_SEGMENTS = oracle("exact", (2, 1), (193, 193), (8, 8), 1, segments="one", dtype="float16")
HALF_UNEVEN = oracle("exact", (2, 1), (65, 65), (24, 8), 1, dtype="float16")
HALF_LSH = oracle("lsh", (2, 1), (193, 193), (8, 8), 1, flatter=16.0, dtype="float16")
HALF_MANY = oracle("lsh", (2, 1), (193, 193), (8, 8), 1, flatter=32.0, samples=40, dtype="float16")
TALL = (
    "test_tall_tiles_equal_oracle",
    oracle("lsh", (2, 1), (193, 193), (8, 8), 1, True, dtype="float16", flatter=32.0),
)
TALL_MANY = (
    "test_tall_tiles_equal_oracle",
    oracle("lsh", (2, 1), (130, 130), (8, 8), 1, dtype="float16", flatter=32.0, samples=40),
)
HALF_WIDE = oracle("exact", (2, 1), (65, 65), (8, 72), 1, True, dtype="float16")
HALF_WIDE_LSH = oracle("lsh", (2, 1), (129, 129), (8, 72), 1, flatter=9.0, dtype="float16")
HALF_HEADS = oracle("exact", (2, 1), (65, 65), (8, 8), 1, dtype="float16")
HUGE, TINY = (
    ("test_gradients_keep_powers_of_two", {"method": "exact", "size": size, "dtype": "float16"})
    for size in ("huge", "tiny")
)
BRAIN = oracle("exact", (2, 1), (65, 65), (8, 8), 1, dtype="bfloat16")
WILD = ("test_wild_offsets_on_the_device_do_no_harm", {"method": "lsh"})
ODD = oracle("exact", (2, 1), (65, 100), (8, 8), 1)
STRONG = oracle("exact", (2, 1), (65, 65), (3, 4), 2, scale=1.5)
MATES = oracle("exact", (2, 1), (65, 65), (8, 8), 2)
VIEW = {"name": "test_strides_are_honoured", "arguments": {"view": "every second"}}

MUTANTS = [
    # params.cuh
    Mutant("ids cut to 32 bits", "params.cuh", "default: return read<int64>(from);",
           "default: return read<int>(from);", "test_ids_beyond_32_bits_differ"),
    Mutant("unsigned ids read as signed", "params.cuh", "return read<unsigned char>(from);",
           "return read<signed char>(from);", "test_integers_of_every_dtype",
           {"integers": "uint8"}),
    Mutant("batch row forgotten", "params.cuh", "data + b * batch + h",
           "data + (b - b) * batch + h", ORACLE, FULL),
    # tile.cuh
    Mutant("padding read", "tile.cuh", " && ids[token] >= 0", " && ids[token] >= -1", LAW, PADDING),
    Mutant("dims assumed contiguous", "tile.cuh", "(begin + d) * x.dim)",
           "(begin + d) * (int)sizeof(Float))", LAW, VIEW),
    Mutant("offsets of 32 bits", "tile.cuh", "(first + token) * x.token",
           "(int)((first + token) * x.token)", "test_strides_beyond_four_gigabytes_are_64_bit"),
    Mutant("last dims of a chunk lost", "tile.cuh", "d < CHUNK; d += 4", "d < CHUNK - 4; d += 4",
           ORACLE, BIG),
    Mutant("half the lanes summed", "layout.cuh",
           "for (int step = LANES / 2; step > 0; step /= 2)\n        x +=",
           "for (int step = LANES / 4; step > 0; step /= 2)\n        x +=", ORACLE, EXACT),
    # band.cuh
    Mutant("first block forgotten", "band.cuh", "p.first_block + blockIdx.x", "blockIdx.x",
           "test_work_split_over_several_grids_is_the_same", {"method": "exact"}),
    Mutant("the query itself hidden", "band.cuh", "lead >= 0", "lead > 0", ORACLE, EXACT),
    Mutant("causality of the keys' side", "band.cuh", "own_queries ? d : -d", "d", ORACLE, EXACT),
    Mutant("width short by one", "band.cuh", "d <= bandwidth && -d <= bandwidth",
           "d < bandwidth && -d < bandwidth", ORACLE, WINDOW),
    Mutant("tiles partly in the band taken whole", "band.cuh", "farthest <= bandwidth",
        "farthest <= bandwidth + COLUMNS",
           ORACLE, WINDOW),
    Mutant("last tile rounded away", "band.cuh", "(high - own_at + COLUMNS - 1) >> 6",
           "(high - own_at) >> 6", ORACLE, FULL),
    Mutant("tiles past the end taken whole", "band.cuh",
           "first + COLUMNS <= other_length", "first <= other_length", ORACLE, FULL),
    Mutant("padding sees padding", "band.cuh", "id >= 0 && id == other_ids",
           "id == other_ids", ORACLE, SEGMENTS),
    Mutant("segments forgotten in whole tiles", "band.cuh", "return !segmented && ", "return ",
           ORACLE, SEGMENTS),
    # weight.cuh
    Mutant("slope of the first head", "weight.cuh", "p.slopes.at(b, h, 0)", "p.slopes.at(b, 0, 0)",
           ORACLE, EXACT),
    Mutant("blocks rounded to 0", "weight.cuh",
           "if (above - index * width < 0) index -= 1;", "", ORACLE, LSH),
    Mutant("block one too long", "weight.cuh", "at < ends[r]", "at <= ends[r]", ORACLE, LSH),
    Mutant("right pivot past the last token", "weight.cuh",
           "t < 0 ? band.own_at : band.own_at + ROWS - 1", "band.own_at", ORACLE, LSH),
    Mutant("bits of the other side kept", "weight.cuh", "side != held ||", "held == 0 ||",
           ORACLE, LSH),
    Mutant("later blocks of the diagonal shared", "weight.cuh", "of_row == of_column",
           "of_row >= of_column",
           ORACLE, LSH),
    Mutant("first word of samples only", "weight.cuh", "first < p.samples; first += WORD",
           "first < WORD; first += WORD", ORACLE, MANY),
    Mutant("labels of the diagonal cut", "weight.cuh", "first < p.samples; first += LABELS",
           "first < LABELS; first += LABELS", ORACLE, MANY),
    Mutant("one sample too many", "weight.cuh", "Bounds{1, 0}", "Bounds{0, 1 << 30}", ORACLE, LSH),
    Mutant("blocks of a table searched too far", "weight.cuh", "> own)", "> own + 1)", ORACLE,
           TABLE),
    Mutant("reach of one sample a thread", "weight.cuh", "low = other_low < low ? other_low : low;",
           "low = other_low < low ? low : low;", ORACLE, LSH),
    # forward.cu
    Mutant("output not rescaled", "softmax.cuh", "out[m][slot] *= fade;", "out[m][slot] *= 1;",
           ORACLE, EXACT),
    Mutant("sum not rescaled", "softmax.cuh", "total[m] * fade", "total[m]", ORACLE, EXACT),
    Mutant("maximum of hidden pairs", "softmax.cuh", "const bool here = count[m][n] > 0;",
           "const bool here = count[m][n] >= 0;", LAW, HIDDEN),
    Mutant("hidden pairs weighed", "weight.cuh", "(Acc)(seen >> (N * m + n) & 1);",
           "(Acc)(seen >> (N * m + n) | 1);", ORACLE, EXACT),
    Mutant("counts left out", "softmax.cuh", "* count[m][n] * norm[m]", "* norm[m]", ORACLE, LSH),
    Mutant("mean left out of the lse", "softmax.cuh", " - weight.normaliser(p)",
           " - 0 * weight.normaliser(p)", ORACLE, LSH),
    Mutant("sums past the range kept", "forward.cu", "round == 1 ||", "round >= 0 ||",
           "test_sums_past_the_range_of_values_within_it", {"method": "exact", "dtype": "float32"}),
    Mutant("scale above 1 forgotten", "softmax.cuh", "x[m][n] * scale",
           "x[m][n] * (scale > 1 ? 1 : scale)",
           "test_scales_that_leave_the_range_in_one_factor_only"),
    Mutant("wrong key head", "forward.cu", "place.h / (p.heads / p.kv_heads)",
           "place.h % p.kv_heads", ORACLE, FULL),
    # backward
    Mutant("sign of dlse", "backward_queries.cu", "delta[m] -= read<Acc>",
           "delta[m] += read<Acc>", ORACLE, EXACT),
    Mutant("delta left out", "backward_queries.cu", "(ds[m][n] - delta[m])", "(ds[m][n])",
           ORACLE, EXACT),
    Mutant("scale left out of dq", "backward_queries.cu", "scale[m] = (Acc)p.scale", "scale[m] = 1",
           ORACLE, SCALED),
    Mutant("distance with a sign", "backward_queries.cu", "d < 0 ? -d : d", "d", ORACLE, FULL),
    Mutant("one group's slopes", "backward_queries.cu", "g < GROUPS", "g < GROUPS - 1", ORACLE,
           FULL),
    Mutant("one head of a group", "backward_keys.cu", "h < (place.h + 1) * heads",
           "h < place.h * heads + 1", ORACLE, FULL),
    Mutant("queries scaled twice", "backward_keys.cu", "chunk * CHUNK, p.dim, 1);",
           "chunk * CHUNK, p.dim, (Acc)p.factor);", ORACLE, SCALED),
    Mutant("dead queries read", "backward_keys.cu", "other_ids[i] = -1;", "",
           "test_a_query_without_a_key_beside_others_reaches_nothing"),
    Mutant("normaliser left out of P", "backward_keys.cu", "given + weight.normaliser(p)", "given",
           ORACLE, LSH),
    Mutant("slopes of one batch row", "backward_slopes.cu",
           "p.grad_slopes.batch == 0 ? p.batch : 1", "1", ORACLE, SHARED),
    Mutant("slopes of all batch rows", "backward_slopes.cu",
           "p.grad_slopes.batch == 0 ? p.batch : 1", "p.batch", ORACLE, ROWS),
    Mutant("tokens past the end read", "band.cuh", "first + i < length", "first + i <= length",
           ORACLE, EXACT),
    Mutant("tokens before the first read", "band.cuh", "first + i >= 0 && ", "", ORACLE, ODD),
    Mutant("blocks begin between tokens", "weight.cuh", "(index * width + shift + unit) >> 24",
           "(index * width + shift) >> 24", ORACLE, LSH),
    Mutant("padding has blocks of its own", "weight.cuh",
           "at = position > 0 ? position : 0;  //", "at = position;  //", *WILD),
    Mutant("bits of padding", "weight.cuh", "(int)(position > 0 ? position : 0)", "(int)position",
           *WILD),
    Mutant("reach of the first owned position", "weight.cuh",
           "bounds_of(p, h, r, band.own_at + ROWS - 1)", "bounds_of(p, h, r, band.own_at)",
           ORACLE, LSH),
    Mutant("pivot's block begins late", "weight.cuh", "begins[r] <= at", "begins[r] < at", ORACLE,
           LSH),
    Mutant("positions beyond a table read", "weight.cuh",
           "low < p.label_count ? low : p.label_count - 1", "low", ORACLE, TABLE),
    Mutant("fade by the new maximum", "softmax.cuh", "power_of_two((top[m] - shift)",
           "power_of_two((most - shift)", ORACLE, EXACT),
    Mutant("lse of rows past the end", "softmax.cuh", "lane() == 0 && i < p.len_q", "lane() == 0",
           ORACLE, EXACT),
    Mutant("dims past the end written", "tile.cuh", "if (d < dim) write",
           "if (d <= dim) write", ORACLE, BIG),
    Mutant("last chunk of dims cut", "tile.cuh", "(int)(dim + CHUNK - 1) / CHUNK * CHUNK",
           "(int)dim / CHUNK * CHUNK", ORACLE, BIG),
    Mutant("tile added to the chunk before", "tile.cuh", "sum[m][chunk * PER_CHUNK + slot] +=",
           "sum[m][chunk / 2 * PER_CHUNK + slot] +=", ORACLE, BIG),
    Mutant("tile replaces the sum", "tile.cuh", "sum[m][chunk * PER_CHUNK + slot] +=",
           "sum[m][chunk * PER_CHUNK + slot] =", ORACLE, EXACT),
    Mutant("one sum through all tiles", "tile.cuh",
           "Acc part[M][PER_CHUNK] = {};",
           "Acc part[M][PER_CHUNK];\nfor (int m = 0; m < M; ++m)\n"
           "for (int slot = 0; slot < PER_CHUNK; ++slot) {\n"
           "part[m][slot] = sum[m][chunk * PER_CHUNK + slot];\n"
           "sum[m][chunk * PER_CHUNK + slot] = 0;\n}",
           "test_sums_over_thousands_of_tokens_round_as_dense_ones"),
    Mutant("one product through all dims", "tile.cuh", "Acc part[M][N] = {};",
           "Acc part[M][N];\nfor (int m = 0; m < M; ++m)\nfor (int n = 0; n < N; ++n) {\n"
           "part[m][n] = sum[m][n];\nsum[m][n] = 0;\n}",
           "test_products_over_hundreds_of_dims_round_as_dense_ones"),
    Mutant("keys' logits without a scale", "backward_keys.cu",
           "begin,\n                           p.dim, (Acc)p.factor);",
           "begin,\n                           p.dim, 1);", ORACLE, SCALED),
    Mutant("keys' logits without a scale above 1", "backward_keys.cu", "x[m][n] * (Acc)p.after",
           "x[m][n]", ORACLE, STRONG),
    Mutant("queries' logits without a scale above 1", "backward_queries.cu",
           "x[m][n] * (Acc)p.after", "x[m][n]", ORACLE, STRONG),
    Mutant("parts by batch row first", "backward_slopes.cu",
           "b + e / p.tiles, h, e % p.tiles", "b + e % rows, h, e % p.tiles", ORACLE, MATES),
    Mutant("half slopes read as bfloat16", "params.cuh", "case FLOAT16: return widen(read<Half>",
           "case FLOAT16: return widen(read<BFloat16>", "test_slopes_of_every_dtype",
           {"dtype": "float16"}),
    Mutant("sign of the gradient by slopes", "backward_slopes.cu", "write<float>(to, (float)-sum)",
           "write<float>(to, (float)sum)", ORACLE, SHARED),
    # tensor cores
    Mutant("keys past the end copied", "forward_tensor.cu", "first + i < p.len_k",
           "first + i <= p.len_k", ORACLE, HALF),
    Mutant("keys before the first copied", "forward_tensor.cu", "first + i >= 0 && ", "", ORACLE,
           HALF_APART),
    Mutant("values of padding copied", "forward_tensor.cu",
           "other_ids[i] >= 0", "first + i >= 0 && first + i < p.len_k",
           "test_what_stands_in_padding_reaches_nothing", {"method": "exact", "dtype": "float16"}),
    Mutant("one tile of keys twice", "forward_tensor.cu",
           "copy_keys(t + 1);\n            soft", "copy_keys(t);\n            soft", ORACLE,
           HALF),
    Mutant("keys after a hidden tile not copied", "forward_tensor.cu",
           "if (t + 1 < band.end) copy_keys(t + 1);\n                    continue;", "continue;",
           ORACLE, HALF_SEGMENTS),
    Mutant("values of the last tile not waited for", "forward_tensor.cu",
           "wait_copies(t + 1 < band.end)", "wait_copies(1)", ORACLE, HALF),
    Mutant("queries not scaled", "tensor.cuh", "if (factor == 1) return;",
           "if (factor < 2) return;", ORACLE, BRAIN),
    Mutant("dims of a step left as they are", "tensor.cuh",
           "(dim + STEP - 1) / STEP * STEP", "dim", ORACLE, HALF_UNEVEN),
    Mutant("dims in place of tokens", "tensor.cuh", "load_transposed<Float>(b,",
           "load_matrices<Float>(b,", ORACLE, HALF),
    Mutant("rows of a warp twice", "tensor.cuh", "threadIdx.x / 32 * 16 + l % 16",
           "threadIdx.x / 32 * 16 + l % 8", ORACLE, HALF),
    Mutant("second bit of two lost", "tensor.cuh", "two << 15", "two << 14", ORACLE, HALF_LSH),
    Mutant("samples beyond the first 16 lost", "tensor.cuh", "at < bits + 2 * lane()",
           "at < STEP + 0 * bits",
           ORACLE, HALF_MANY),
    Mutant("a pair of dims past the end", "tensor.cuh", "if (dim_of(slot) < dim)",
           "if (dim_of(slot) <= dim)", ORACLE, HALF),
    Mutant("pairs left unrounded to the wrong row", "tensor.cuh",
           "pack<Float>(pairs[1][n], pairs[1][n + 1])", "pack<Float>(pairs[0][n], pairs[0][n + 1])",
           ORACLE, HALF),
    # gradients on tensor cores
    Mutant("units that do not grow", "tensor.cuh", "if (wanted > unit[m])",
           "if (wanted > unit[m] && unit[m] < 0)", *HUGE),
    Mutant("units above the pairs", "tensor.cuh", "0x1p-100f", "1", *TINY),
    Mutant("sums of earlier tiles in old units", "tensor.cuh",
           "fade = unit[m] * inverse_power(wanted)", "fade = 1", ORACLE, HALF),
    Mutant("a unit a lane", "tensor.cuh", "binade(max_lanes(most))", "binade(most)", ORACLE, HALF),
    Mutant("units left in the result", "backward_queries_tensor.cu",
           "(Acc)p.scale * units.unit[m]", "(Acc)p.scale", ORACLE, HALF),
    Mutant("mean of dP left in", "backward_queries_tensor.cu", "(ds[m][n] - delta[m])",
           "ds[m][n]", ORACLE, HALF),
    Mutant("hidden values reach queries", "backward_queries_tensor.cu",
           "pair != 0 ? pair * (ds[m][n] - delta[m]) : 0", "pair * (ds[m][n] - delta[m])",
           "test_what_is_hidden_reaches_no_gradient"),
    Mutant("hidden gradients reach keys", "backward_keys_tensor.cu",
           "x[m][n] != 0 ? x[m][n] * moved : 0", "x[m][n] * moved",
           "test_what_is_hidden_reaches_no_gradient"),
    Mutant("keys of the first half", "backward_queries_tensor.cu", "keys + from * PITCH", "keys",
           ORACLE, HALF),
    Mutant("values of the first half", "backward_queries_tensor.cu", "values + from * PITCH",
           "values", ORACLE, HALF),
    Mutant("distances of the first half", "backward_queries_tensor.cu",
           "row_of(m) - from - column_of(n)", "row_of(m) - column_of(n)", ORACLE, HALF),
    Mutant("keys after a hidden tile forgotten", "backward_queries_tensor.cu",
           "if (t + 1 < band.end) copy(keys, p.k, t + 1, p.dim);", "", ORACLE, HALF_SEGMENTS,
           (AssertionError, EmulatorFault)),
    Mutant("keys in the place of keys", "backward_queries_tensor.cu",
           "copy(values, p.k, t + 1, p.dim)", "copy(keys, p.k, t + 1, p.dim)", ORACLE, HALF,
           EmulatorFault),
    Mutant("ids of the tile before", "backward_queries_tensor.cu", "(t & 1) * COLUMNS", "(t & 0)",
           ORACLE, HALF, EmulatorFault),
    Mutant("places of keys and values kept", "backward_queries_tensor.cu",
           "at = COLUMNS * PITCH - at;", "", ORACLE, HALF, (AssertionError, EmulatorFault)),
    Mutant("own keys not scaled", "backward_keys_tensor.cu",
           "scale_tile(k, p.dim, (Acc)p.factor);", "", ORACLE, BRAIN),
    Mutant("weights left in their unit", "backward_keys_tensor.cu", "by_v[m] = 1 / PEAK",
           "by_v[m] = 1", ORACLE, HALF),
    Mutant("weights of tiny size", "tensor.cuh", "NARROW<Float> ? 32768 : 1",
           "NARROW<Float> ? 0x1p-18f : 1", ORACLE, HALF),
    Mutant("queries without a key copied", "backward_keys_tensor.cu", "ids[i] = -1;", "",
           "test_a_query_without_a_key_reaches_no_gradient"),
    Mutant("one query head of a group", "backward_keys_tensor.cu", "h < (place.h + 1) * heads",
           "h < place.h * heads + 1", ORACLE, HALF_HEADS),
    Mutant("half of the columns of wide rows", "backward_keys_tensor.cu", "part < N; part += PART",
           "part < PART; part += PART", ORACLE, HALF_WIDE, (AssertionError, EmulatorFault)),
    Mutant("lse of the first half", "backward_keys_tensor.cu",
           "const int column = from + column_of(n)", "const int column = column_of(n)", ORACLE,
           HALF_WIDE),
    Mutant("delta of the first half", "backward_keys_tensor.cu", "delta[from + column_of(n)]",
           "delta[column_of(n)]", ORACLE, HALF_WIDE),
    Mutant("visible pairs of the first half", "weight.cuh", "seen >>= first;\n#pragma unroll\n"
           "        for (int m = 0; m < M; ++m)\n#pragma unroll\n"
           "            for (int n = 0; n < COUNT; ++n) weight",
           "seen >>= 0 * first;\n#pragma unroll\n        for (int m = 0; m < M; ++m)\n"
           "#pragma unroll\n            for (int n = 0; n < COUNT; ++n) weight", ORACLE, HALF_WIDE),
    Mutant("bits of the first half", "weight.cuh", "other_bits + from", "other_bits", ORACLE,
           HALF_WIDE_LSH),
    Mutant("labels of the first half", "weight.cuh", "r * SPAN + from +",
           "r * SPAN + 0 * from +", ORACLE, HALF_WIDE_LSH),
    # tall tiles
    Mutant("one tile of the diagonal", "band.cuh", "t < DIAGONALS", "t < 1", *TALL),
    Mutant("labels of the first tile twice", "weight.cuh", "(int)t * COLUMNS +", "(int)t * 0 +",
           *TALL),
    Mutant("labels of the last samples kept", "weight.cuh", "!labelled || p.samples > LABELS",
           "!labelled", *TALL_MANY),
    Mutant("labels of another head", "weight.cuh", "labelled = false", "labelled = head > 0",
           ORACLE, LSH, EmulatorFault),
    Mutant("half of the queries copied", "forward_tensor.cu", "copy_tile<ROWS>", "copy_tile", *TALL,
           EmulatorFault),
]  # fmt: skip


class MutantEmulator(Emulator):
    """Compiles what the mutated file reaches, and takes the rest as it is."""

    def __init__(self, folder, file):
        super().__init__(folder, folder)
        self._file = file

    def compile(self, instance):
        if self._file in (f"{instance.kernel}.cu",) or self._file.endswith(".cuh"):
            return super().compile(instance)
        return BACKEND.emulator.compile(instance)


QUICK = {
    "ids cut to 32 bits",
    "padding read",
    "dims assumed contiguous",
    "offsets of 32 bits",
    "first block forgotten",
    "causality of the keys' side",
    "tiles partly in the band taken whole",
    "blocks rounded to 0",
    "right pivot past the last token",
    "first word of samples only",
    "output not rescaled",
    "maximum of hidden pairs",
    "mean left out of the lse",
    "wrong key head",
    "sign of dlse",
    "one head of a group",
    "dead queries read",
    "slopes of one batch row",
    "keys after a hidden tile not copied",
    "values of the last tile not waited for",
    "samples beyond the first 16 lost",
    "one tile of the diagonal",
    "units that do not grow",
}
"""Mutants of every run; the others are slow."""


def named_test(mutant):
    """Return the named test, of the kernels or, if they have none of that name, of tensor cores."""
    return getattr(tests, mutant.test, None) or getattr(tensor_tests, mutant.test)


def marked(mutants):
    """Return parameters, those that are not quick marked as slow."""
    slow = (pytest.mark.slow,)
    return [pytest.param(m, marks=() if m.name in QUICK else slow, id=str(m)) for m in mutants]


def test_quick_mutants_exist():
    assert {m.name for m in MUTANTS} >= QUICK
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", marked(MUTANTS))
def test_mutant_is_killed(mutant, monkeypatch, tmp_path):
    for path in KERNELS.iterdir():
        shutil.copy(path, tmp_path)
    shutil.copy(BACKEND.emulator.compile_core(), tmp_path)
    (tmp_path / mutant.module).write_text(mutant.changed((KERNELS / mutant.module).read_text()))
    backend = EmulatedBackend(emulator=MutantEmulator(tmp_path, mutant.module))
    monkeypatch.setattr(tests, "BACKEND", backend)
    put_in_place(monkeypatch, backend)
    with pytest.raises(mutant.error):
        call(named_test(mutant), mutant.arguments, monkeypatch)


@pytest.mark.slow  # the tests themselves run in their own file
@pytest.mark.parametrize("control", controls(MUTANTS))
def test_the_kernels_as_they_are_survive(control, monkeypatch):
    """So that it is the fault that is found."""
    put_in_place(monkeypatch)
    call(named_test(control), control.arguments, monkeypatch)
