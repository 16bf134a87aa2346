"""FP8 number format, block scales, and the matrix product of plain and quantised weights."""
