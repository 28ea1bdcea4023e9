//! State of the running gateway that the parts of its control path share.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::Notify;

use crate::config::Config;
use crate::datapath::DataPath;
use crate::snapshot::Publisher;
use crate::status::Status;
use crate::xds::live::LiveSource;

use super::listeners::Listeners;

/// Condition of readiness: the mesh is known.
pub(super) const DISCOVERY: &str = "discovery";

/// Condition of readiness: the objects of the API server beside a control plane are known.
pub(super) const OBJECTS: &str = "objects";

/// Running gateway from the view of its control path.
#[derive(Clone)]
pub(super) struct App {
    pub(super) config: Arc<ArcSwap<Config>>,
    pub(super) data_path: Arc<DataPath>,
    pub(super) status: Arc<Status>,
    pub(super) publisher: Arc<Publisher>,
    pub(super) listeners: Arc<Listeners>,
    /// Objects of an API server, if one is watched.
    pub(super) live: Option<Arc<LiveSource>>,
    /// Notified when the control plane is reachable again.
    pub(super) reconnected: Arc<Notify>,
}
