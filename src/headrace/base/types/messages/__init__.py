"""The messages between the processes of a run, with one module per receiver, and the codec that encodes them.

Messages are msgspec records. They are typed when decoded, use no pickle, and contain arrays as raw buffers.
"""
