"""Fields of values as data: reader, writer, and CustomResourceDefinitions made of them."""
