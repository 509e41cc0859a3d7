"""Ways of connecting sub-layers, each behind one protocol."""

from depthroute.residual.attnres import AttnRes as AttnRes
from depthroute.residual.attnres import AttnResConfig as AttnResConfig
from depthroute.residual.bank import Bank as Bank
from depthroute.residual.method import Degenerate as Degenerate
from depthroute.residual.method import Method as Method
from depthroute.residual.norm import RMSNorm as RMSNorm
from depthroute.residual.norm import normalised as normalised
from depthroute.residual.prenorm import PreNorm as PreNorm
from depthroute.residual.prenorm import PreNormConfig as PreNormConfig
from depthroute.residual.protocol import METHODS as METHODS
from depthroute.residual.protocol import NO_TRACE as NO_TRACE
from depthroute.residual.protocol import Adaptation as Adaptation
from depthroute.residual.protocol import Body as Body
from depthroute.residual.protocol import Inputs as Inputs
from depthroute.residual.protocol import Kept as Kept
from depthroute.residual.protocol import Memory as Memory
from depthroute.residual.protocol import Norm as Norm
from depthroute.residual.protocol import Projected as Projected
from depthroute.residual.protocol import Residual as Residual
from depthroute.residual.protocol import ResidualConfig as ResidualConfig
from depthroute.residual.protocol import RoleInputs as RoleInputs
from depthroute.residual.protocol import Trace as Trace
from depthroute.residual.registry import SPECIFICATIONS as SPECIFICATIONS
from depthroute.residual.registry import parse_residual as parse_residual
from depthroute.residual.registry import register as register
from depthroute.residual.schedule import block_ends as block_ends
