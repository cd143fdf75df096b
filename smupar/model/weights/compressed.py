"""A weight of which only the non-zeros are kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from smupar.model.gradients import DenseGradient
from smupar.model.sharding import num_ranks
from smupar.model.sparse_linear import MaskChange, SparseLinear
from smupar.model.weights.model_weight import ModelWeight
from smupar.plan.roles.parameters import parent_path
from smupar.refusals import refuse


class CompressedWeight(ModelWeight):
    """A weight that keeps only its non-zeros. Its layer has the index of their positions."""

    stores_zeros = False
    module: SparseLinear

    @property
    def shape(self) -> tuple[int, ...]:
        return self.module.matrix_shape

    @property
    def num_bytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size() + self.module.num_index_bytes

    def full(self) -> Tensor:
        return self.module.expand(self.parameter.detach())

    def laid_out(self, matrix: Tensor) -> Tensor:
        return self.module.gather(matrix)

    @property
    def mask(self) -> Tensor:
        return self.module.weight_mask

    @property
    def mask_buffers(self) -> tuple[str, ...]:
        return tuple(f"{parent_path(self.name)}.{leaf}".lstrip(".") for leaf in self.module.index_names)

    def install_mask(self, mask: Tensor | None = None) -> None:
        if mask is not None:
            self.module.move_nonzeros(mask.to(self.parameter.device))

    def zero_off_mask(self) -> None:
        """Does nothing, since only weights on the mask are stored."""

    def _write_mask(self, new: Tensor) -> MaskChange:
        refuse(
            num_ranks() > 1 and int(new.sum()) != len(self.parameter),
            f"{self.name!r} keeps only its non-zeros, and their number cannot change on several ranks: keep it dense",
        )
        return self.module.move_nonzeros(new)

    @property
    def dense_gradient(self) -> DenseGradient:
        return self.module.dense

    def can_multiply(self, in_dims: Sequence[int]) -> bool:
        return True

    def multiply(self, x: Tensor, *, in_dim: int = 1) -> Tensor:
        return self.module.product(x)

    def input_gradient(self, x: Tensor, output_grad: Tensor, *, in_dim: int = 1) -> Tensor:
        matrix = self.full().to(output_grad.dtype)
        return output_grad @ (matrix if in_dim == 1 else matrix.T)

    def num_kept(self) -> Tensor:
        return self.parameter.new_tensor(self.parameter.numel())

    def snapshot(self) -> Tensor:
        return self.full()

    def make_room(self, num_values: int) -> None:
        self.module.make_room(num_values)

    def is_foreign(self, shape: Sequence[int]) -> bool:
        return tuple(shape) == self.shape

    def converted(self, foreign: Tensor) -> Tensor:
        return self.laid_out(foreign)
