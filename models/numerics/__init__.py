"""Numerics: free parameters, Hadamard transforms, standard normals, GPU streams, checks of a device's arithmetic."""
