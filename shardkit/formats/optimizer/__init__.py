"""The state of an optimizer as torch's recipes name it, whatever form a trainer kept it in."""
