"""The messages between the processes of a run, with one file per receiver, and the codec that encodes them.

Messages are msgspec records: typed when decoded, without pickle, with arrays as raw buffers.
"""
