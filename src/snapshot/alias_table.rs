//! Alias table for weighted draws in constant time (Walker's method, built as Vose does).

/// Alias table of weighted items.
///
/// Each item has one column, and all columns have equal height. Their total area is proportional
/// to the sum of all weights. The unused part of a light item's column belongs to a heavier item,
/// so no column has more than two owners. A uniform column and a uniform height in it select each
/// item in proportion to its weight. Integer arithmetic keeps the shares exact.
#[derive(Debug, Default)]
pub(super) struct AliasTable {
    count: usize,
    /// Columns. Empty if all weights are equal, the common case.
    columns: Box<[Column]>,
    /// Height of every column: the sum of all weights.
    height: u64,
}

#[derive(Debug)]
struct Column {
    /// Height below which the column belongs to the item of its own index.
    mark: u64,
    /// Index of the item that owns the rest.
    rest: usize,
}

impl AliasTable {
    /// Returns the table for items with these weights. Items are identified by index.
    pub(super) fn new(weights: impl ExactSizeIterator<Item = u32> + Clone) -> Self {
        let height = weights.clone().map(u64::from).sum();
        let mut others = weights.clone();
        let first = others.next();
        if others.all(|weight| Some(weight) == first) {
            return Self { count: weights.len(), columns: Box::default(), height };
        }
        // The area of an item is its weight times the number of columns: 32 bits times less than
        // 32.
        let count = weights.len() as u64;
        let column =
            |(rest, weight): (usize, u32)| Column { mark: u64::from(weight) * count, rest };
        let mut columns: Box<[_]> = weights.enumerate().map(column).collect();
        let is_light = |&place: &usize| columns[place].mark < height;
        let (mut light, mut heavy): (Vec<_>, Vec<_>) = (0..columns.len()).partition(is_light);
        while let (Some(low), Some(&high)) = (light.pop(), heavy.last()) {
            columns[low].rest = high;
            columns[high].mark -= height - columns[low].mark;
            if columns[high].mark < height {
                light.extend(heavy.pop());
            }
        }
        Self { count: columns.len(), columns, height }
    }

    /// Draws the index of an item by weight. Returns `None` if all weights are 0.
    pub(super) fn draw(&self) -> Option<usize> {
        if self.height == 0 {
            return None;
        }
        // Two random numbers: a single one, below columns × height, may need more than 64 bits.
        let place = fastrand::usize(..self.count);
        if self.columns.is_empty() {
            return Some(place);
        }
        let at = fastrand::u64(..self.height);
        let column = self.columns.get(place)?;
        Some(if at < column.mark { place } else { column.rest })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the area of each item over all columns.
    fn areas(table: &AliasTable) -> Vec<u64> {
        let mut areas = vec![0; table.count];
        if table.columns.is_empty() {
            return vec![table.height; table.count];
        }
        for (place, column) in table.columns.iter().enumerate() {
            let own = column.mark.min(table.height);
            areas[place] += own;
            areas[column.rest] += table.height - own;
        }
        areas
    }

    proptest! {
        #[test]
        fn each_lot_has_exactly_its_share(
            weights in prop_oneof![
                prop::collection::vec(prop_oneof![0..9_u32, any::<u32>()], 0..200),
                (0..9_u32, 0..20_usize).prop_map(|(weight, count)| vec![weight; count]),
            ],
        ) {
            let table = AliasTable::new(weights.iter().copied());
            let count = weights.len() as u64;
            let want: Vec<_> = weights.iter().map(|&weight| u64::from(weight) * count).collect();
            prop_assert_eq!(areas(&table), want);
            prop_assert!(table.columns.iter().all(|column| column.mark <= table.height));
        }
    }

    #[test]
    fn without_a_weight_nothing_is_drawn() {
        let draw = |weights: &[u32]| AliasTable::new(weights.iter().copied()).draw();
        assert_eq!(draw(&[]), None);
        assert_eq!(draw(&[0, 0]), None);
        assert_eq!(draw(&[0, 5, 0]), Some(1));
    }
}
