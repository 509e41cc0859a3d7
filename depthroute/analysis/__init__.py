"""What a trained model does, read from its run folder."""

from depthroute.analysis.routing import effective_sources as effective_sources
from depthroute.analysis.routing import jensen_shannon as jensen_shannon
from depthroute.analysis.routing import write_routing as write_routing
