"""cuDNN's engine room: what every op that ends in cuDNN shares.

`handle` is a lane's cuDNN handle; the other rooms are named where they are imported. Ops import from here, the table
and users never do. Importing this package loads no library.
"""
