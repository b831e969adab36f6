"""Operations: types, shapes and how a function of arrays becomes one of tensors."""
