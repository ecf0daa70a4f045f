"""The operations: validate, allocate, launch; one module a kernel."""
