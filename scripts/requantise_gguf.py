"""Write a GGUF file's weights again as F32, F16 or Q8_0, so that engines that read GGUF can be compared.

    python -m scripts.requantise_gguf IN.gguf OUT.gguf Q8_0

The weights stay those of the input: a Q4_1 file written as F32 holds the dequantised numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

_FILE_TYPES = {
    "F32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
# Written by GGUFWriter itself, or about the input's quantisation.
_LEFT_OUT = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def requantise(source: Path, target: Path, kind: str) -> None:
    """Copy the metadata; write matrices as `kind` and vectors (norms) as F32."""
    weight_type, file_type = _FILE_TYPES[kind]
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith(_LEFT_OUT):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else weight_type
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("kind", choices=sorted(_FILE_TYPES))
    options = parser.parse_args()
    requantise(options.source, options.target, options.kind)
    print(f"{options.target}: {options.target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
