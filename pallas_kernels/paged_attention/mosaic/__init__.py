"""paged_attention for Hopper (sm_90a) in Pallas Mosaic GPU: TMA page copies into a ring, wgmma on it."""
