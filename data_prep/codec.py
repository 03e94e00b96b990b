"""Codecs: what of a token's features is stored.

bf16      the features themselves, in the dtype of the capture
int8      tokens brought to one length, each channel divided by a fixed scale and rounded
lowrank   tokens brought to one length, a fixed linear map to R directions, then int8

A token's length is free: `fc`, which reads the features, has no bias, and the norm behind it takes any length away. It
has to go, as the first token of a row often has thousands of times the energy of the others, in a few channels, and
would set their scale. Length is the root mean square of the channels, each divided by its own size first.

The low-rank map is z = P' x for features x [F], with P [F, R] fitted once on a sample of the same target: channels are
divided by their size (so that a few huge channels do not eat the rank), and the leading eigenvectors of the second
moments are kept. It is linear and uncentred: a drafter that was trained on z with weights W is the drafter with
`fc` = W P' on x (`fold`), and no engine needs to know.

Shapes: T tokens, F features, R what training reads (F, or the rank), D hidden.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from data_prep.config import CacheConfig, CodecKind
from data_prep.files import flush, part_path
from dflash.target import default_device

BALANCE = 4  # rounds in which the sizes of channels and the lengths of tokens settle
CLIP = 16.0  # root mean squares at which a channel saturates, unless its largest value in the sample is below


class Codec:
    """size_F fp32: of the channels; None stores floats as they are. scale_R fp32: of int8 values. map_FR fp32: P; None
    keeps all. lift_FR: x is about lift z."""

    def __init__(self, dtype: torch.dtype, size_F=None, scale_R=None, map_FR=None, lift_FR=None, error: float = 0.0):
        self.dtype, self.size_F, self.scale_R, self.map_FR = dtype, size_F, scale_R, map_FR
        self.lift_FR, self.error = lift_FR, error

    @property
    def rank(self) -> int | None:
        """Numbers a token that training reads; None: the features themselves."""
        return None if self.map_FR is None else self.map_FR.shape[1]

    def encode(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Features [T, F] to what is stored [T, R]: int8, or the codec's dtype."""
        if self.size_F is None:
            return features_TF.to(self.dtype)
        self._move(features_TF.device)
        x = one_length(features_TF.float(), self.size_F)
        x = x if self.map_FR is None else x @ self.map_FR
        return (x / self.scale_R).round().clamp(-127, 127).to(torch.int8)

    def _move(self, device) -> None:
        """Bring what encode and decode need to a device; it stays there."""
        for name in ("size_F", "scale_R", "map_FR"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.to(device))

    def decode(self, stored_TR: torch.Tensor) -> torch.Tensor:
        """What training reads [T, R], in the codec's dtype."""
        if self.size_F is None:
            return stored_TR
        self._move(stored_TR.device)
        return (stored_TR * self.scale_R).to(self.dtype)

    def lift(self, decoded_TR: torch.Tensor) -> torch.Tensor:
        """About the features [T, F] that were packed, tokens brought to one length."""
        return decoded_TR if self.lift_FR is None else decoded_TR @ self.lift_FR.T.to(decoded_TR)

    def fold(self, weight_DR: torch.Tensor) -> torch.Tensor:
        """`fc` on features [D, F] of an `fc` that was trained on what this codec gives [D, R]."""
        return weight_DR if self.map_FR is None else weight_DR @ self.map_FR.T.to(weight_DR)

    def unfold(self, weight_DF: torch.Tensor) -> torch.Tensor:
        """`fc` [D, R] that is nearest to one on features [D, F]."""
        return weight_DF if self.map_FR is None else weight_DF @ self.lift_FR.to(weight_DF)

    def save(self, path: Path) -> None:
        """Write the codec, unless another worker was first."""
        tensors = {"size": self.size_F, "scale": self.scale_R, "map": self.map_FR, "lift": self.lift_FR}
        meta = {"dtype": str(self.dtype).removeprefix("torch."), "error": self.error}
        folder = part_path(path)
        part = folder / path.name
        try:
            folder.mkdir(exist_ok=True)
            save_file(
                {k: v.contiguous() for k, v in tensors.items() if v is not None}, part, {"meta": json.dumps(meta)}
            )
            flush(part)
            path.hardlink_to(part)  # unlike a rename, it fails where the name is taken
        except FileExistsError:
            pass
        except SafetensorError as error:  # how the library reports a full disk
            raise OSError(f"cache.dir: {path} could not be written ({error}); make room, run again") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def load(path: Path) -> "Codec":
        with safe_open(path, framework="pt") as file:
            meta = json.loads(file.metadata()["meta"])
            read = lambda name: file.get_tensor(name) if name in file.keys() else None  # noqa: E731
            tensors = [read(name) for name in ("size", "scale", "map", "lift")]
        return Codec(getattr(torch, meta["dtype"]), *tensors, meta["error"])


def one_length(x_TF: torch.Tensor, size_F: torch.Tensor) -> torch.Tensor:
    """Tokens divided by their length."""
    return x_TF / (x_TF / size_F).square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-12)


@torch.no_grad()
def fit_codec(config: CacheConfig, sample_TF: torch.Tensor) -> Codec:
    """The configured codec, fitted on features of a sample of tokens; `error` is the share of their energy, tokens and
    channels brought to one size, that is lost."""
    dtype = getattr(torch, config.dtype)
    if config.codec == CodecKind.bf16:
        return Codec(dtype)
    x = sample_TF.to(default_device()).double()
    size_F = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    for _ in range(BALANCE):
        size_F = one_length(x, size_F).square().mean(dim=0).sqrt().clamp(min=1e-12)
    x = one_length(x, size_F)
    map_FR = lift_FR = None
    if config.codec == CodecKind.lowrank:
        rank = rank_of(config, x.shape[1])
        moments_FF = (x / size_F).T @ (x / size_F) / len(x)
        directions_FR = torch.linalg.eigh(moments_FF).eigenvectors[:, -rank:].flip(1)
        # An eigenvector's sign is arbitrary; its largest entry is made positive.
        directions_FR *= directions_FR.gather(0, directions_FR.abs().argmax(dim=0, keepdim=True)).sign()
        map_FR, lift_FR = directions_FR / size_F[:, None], directions_FR * size_F[:, None]
    z = x if map_FR is None else x @ map_FR
    scale_R = torch.minimum(z.abs().amax(dim=0), CLIP * z.square().mean(dim=0).sqrt()).clamp(min=1e-12) / 127
    codec = Codec(dtype, *(None if t is None else t.float() for t in (size_F, scale_R, map_FR, lift_FR)))
    back = codec.encode(x) * codec.scale_R.double()
    back = back if lift_FR is None else back @ lift_FR.T
    codec.error = float(((back - x) / size_F).square().mean() / (x / size_F).square().mean())
    return codec


def rank_of(config: CacheConfig, num_features: int) -> int:
    """Directions that the low-rank codec keeps. Raises ValueError for more than there are features."""
    rank = config.rank or num_features // 10
    if rank > num_features:
        raise ValueError(f"cache.rank: found {rank}, expected at most {num_features}, the number of features")
    return rank


def bytes_per_token(config: CacheConfig, num_features: int) -> int:
    """Stored bytes of a token's features."""
    if config.codec == CodecKind.bf16:
        return num_features * getattr(torch, config.dtype).itemsize
    return num_features if config.codec == CodecKind.int8 else rank_of(config, num_features)
