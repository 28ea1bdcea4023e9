//! Certificates in memory: a root, intermediates of three clusters, and leaves for identities.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use rustls::{ClientConfig, ServerConfig};
use strait::tls::{self, IdentityMaterial, TrustedDomain};
use strait::tools::dev::{Authority, Issuer, Leaf};

pub const GATEWAY: &str = "spiffe://east.local/ns/istio-system/sa/eastwest";
pub const ENDPOINT: &str = "spiffe://east.local/ns/app/sa/echo";
pub const CLIENT: &str = "spiffe://west.local/ns/shop/sa/checkout";

/// Certificates of a test.
pub struct Identities {
    pub root: String,
    pub east: Issuer,
    pub west: Issuer,
    pub north: Issuer,
}

/// Returns the set shared by all tests that do not need their own.
pub fn identities() -> &'static Identities {
    static SHARED: LazyLock<Identities> = LazyLock::new(Identities::new);
    &SHARED
}

impl Identities {
    pub fn new() -> Self {
        Self::from_authority(&Authority::new().expect("a root"))
    }

    /// Returns three clusters under the root of `authority`.
    pub fn from_authority(authority: &Authority) -> Self {
        let intermediate = |name| authority.intermediate(name).expect("an intermediate");
        Self {
            root: authority.root_pem(),
            east: intermediate("east"),
            west: intermediate("west"),
            north: intermediate("north"),
        }
    }

    /// Returns a certificate for `id`, signed by the cluster of its trust domain.
    pub fn leaf(&self, id: &str) -> Leaf {
        let issuer = if id.starts_with("spiffe://east.local/") { &self.east } else { &self.west };
        issuer.leaf(id).expect("a leaf")
    }

    pub fn material(&self, leaf: &Leaf) -> IdentityMaterial {
        IdentityMaterial::from_pem(&leaf.chain_pem, &leaf.key_pem, &self.root).expect("material")
    }

    /// Returns the TLS configuration of a client with identity `id` that expects `server`.
    pub fn client(&self, id: &str, server: &str) -> Arc<ClientConfig> {
        tls::client_config(&self.material(&self.leaf(id)), &[server]).expect("a client")
    }

    /// Returns the TLS configuration of an endpoint that admits cluster west.
    pub fn server(&self, id: &str) -> Arc<ServerConfig> {
        let west = TrustedDomain { name: "west.local".into(), issuers: None, roots: None };
        tls::endpoint_server_config(&self.material(&self.leaf(id)), vec![west]).expect("a server")
    }
}

/// Makes the gateway of a folder determine these clusters by their issuers, and none by its trust
/// domain.
pub fn determine_clusters_by_issuers(folder: &Path, clusters: &[(&str, &Issuer)]) {
    let entries = clusters.iter().map(|(name, issuer)| {
        std::fs::write(folder.join(format!("{name}.pem")), issuer.pem()).expect("a file");
        format!("    - {{name: {name}, issuers: [{name}.pem]}}\n")
    });
    let entries: String = entries.collect();
    let file = folder.join("strait.yaml");
    let mut text = std::fs::read_to_string(&file).expect("a configuration");
    for cluster in ["east", "west"] {
        let domain = format!("{{name: {cluster}.local, cluster: {cluster}}}");
        assert!(text.contains(&domain), "{text}");
        text = text.replace(&domain, &format!("{{name: {cluster}.local}}"));
    }
    let text = text.replace("listeners:\n", &format!("  clusters:\n{entries}listeners:\n"));
    std::fs::write(file, text).expect("a configuration");
}
